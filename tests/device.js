'use strict';
// A device of the tests: a PouchDB on disk. Each line on stdin is one call, [method, …arguments], in JSON. The response
// is one line on stdout, {value} or {error}. `push` and `pull` replicate once; `sync` begins a continuous replication.
const {createInterface} = require('readline');
const PouchDB = require('pouchdb');

const [folder, url] = process.argv.slice(2);
const db = new PouchDB(folder);
const remote = new PouchDB(url, {skip_setup: true});
let syncing = null;

const counts = found => ({read: found.docs_read, written: found.docs_written, failed: found.doc_write_failures});
const methods = {
  put: doc => db.put(doc),
  bulk: (docs, options) => db.bulkDocs(docs, options),
  get: (id, options) => db.get(id, options).catch(error => (error.status === 404 ? null : Promise.reject(error))),
  remove: async id => db.remove(await db.get(id)),
  push: async options => counts(await db.replicate.to(remote, options)),
  pull: async options => counts(await db.replicate.from(remote, options)),
  sync: () => {
    syncing = db.sync(remote, {live: true, retry: true, back_off_function: () => 100});
    syncing.catch(() => {});
    return true;
  },
  stop: () => syncing.cancel(),
};

createInterface({input: process.stdin}).on('line', async line => {
  const [method, ...given] = JSON.parse(line);
  let response;
  try {
    response = {value: (await methods[method](...given)) ?? null};
  } catch (error) {
    response = {error: `${error.name}: ${error.message || error.reason}`};
  }
  process.stdout.write(`${JSON.stringify(response)}\n`);
}).once('close', () => process.exit());
