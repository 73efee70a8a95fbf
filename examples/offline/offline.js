'use strict';
// The service worker: it keeps the files of the page, so that the page can be opened without a network.
const FILES = ['./', 'index.html', 'shop.js', 'node_modules/pouchdb/dist/pouchdb.min.js'];
const CACHE = 'shop-1'; // change the number with the files

self.addEventListener('install', event => event.waitUntil(caches.open(CACHE).then(cache => cache.addAll(FILES))));
self.addEventListener('activate', event => event.waitUntil(
  caches.keys().then(names => Promise.all(names.filter(name => name !== CACHE).map(name => caches.delete(name)))),
));
self.addEventListener('fetch', event => {
  // Requests to CouchDB are not cached.
  if (event.request.method === 'GET' && new URL(event.request.url).origin === location.origin) {
    event.respondWith(caches.match(event.request, {ignoreSearch: true}).then(found => found || fetch(event.request)));
  }
});
