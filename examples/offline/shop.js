'use strict';
// The page writes orders into its own database only. PouchDB replicates it with the database of this user on the server,
// whenever the server can be reached, and brings back what became of the orders, in the same documents.
const db = new PouchDB('shop');
const find = id => document.getElementById(id);
const money = cents => `${(cents / 100).toFixed(2)} €`;

// Whoever has the password of this user sees the orders of this user. It is forgotten when the tab is closed.
const login = () => JSON.parse(sessionStorage.getItem('login'));
const delivered = new Set(JSON.parse(localStorage.getItem('delivered') || '[]'));

// -- orders

/** Put a task into the own database. The id begins with the user's name: `connect` replicates only these documents. */
async function send(task, kwargs) {
  const user = localStorage.getItem('user');
  if (!user) return tell('connect once, so that orders have your name');
  const id = `${user}:${new Date().toISOString()}-${Math.random().toString(36).slice(2)}`;
  await db.put({_id: id, task, kwargs});
}

/** Return the state of an order, and what is to be said about it. */
function progress(doc) {
  if (doc.status === 'refused') return ['refused', doc.reason];
  if (doc.type !== 'Receipt') return delivered.has(doc._id) ? ['delivered', ''] : ['waiting', 'it waits on this device'];
  if (doc.done === undefined) return ['queued', 'the shop has it'];
  if (doc.error !== undefined) return ['failed', doc.error];
  return ['done', doc.result && doc.result.total ? `the bill is ${money(doc.result.total)}` : ''];
}

function line(doc) {
  const [state, text] = progress(doc);
  const item = document.createElement('li');
  item.dataset.state = state;
  const {article, count, amount} = doc.kwargs || {};
  item.textContent = article ? `${count} × ${article}` : `a refund of ${money(amount)}`;
  const note = item.appendChild(document.createElement('small'));
  note.textContent = text ? `${state}: ${text}` : state;
  return item;
}

async function show() {
  const {rows} = await db.allDocs({include_docs: true, descending: true, limit: 100});
  find('orders').replaceChildren(...rows.filter(row => row.doc.task).map(row => line(row.doc)));
}

// -- the network

let sync = null;

function tell(text) {
  find('network').textContent = text;
}

/**
 * Replicate in both directions, now and after each change, and try again while there is no network.
 * The orders of other users of this browser stay here: they would run once for each user.
 */
function connect() {
  if (sync) sync.cancel();
  const {url, user, password} = login();
  const server = new PouchDB(url, {auth: {username: user, password}, skip_setup: true});
  tell('connecting');
  sync = db.sync(server, {
    live: true,
    retry: true,
    back_off_function: delay => Math.min(delay * 2 || 500, 10_000),
    push: {filter: doc => doc._id.startsWith(`${user}:`)},
  });
  sync.on('change', ({direction, change}) => {
    if (direction === 'push') {
      for (const doc of change.docs) delivered.add(doc._id);
      localStorage.setItem('delivered', JSON.stringify([...delivered].slice(-1000)));
      show();
    }
  });
  sync.on('active', () => tell('connected'));
  sync.on('paused', error => tell(error ? 'offline: orders wait here' : 'connected'));
  sync.on('denied', error => tell(`the server has refused a document: ${error.doc?.message || error.message || ''}`));
  sync.on('error', error => tell(`not connected: ${error.message || error.reason || error}`));
}

// -- the page

find('login').addEventListener('submit', event => {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(event.target));
  sessionStorage.setItem('login', JSON.stringify(given));
  localStorage.setItem('user', given.user);
  connect();
});
find('order').addEventListener('submit', event => {
  event.preventDefault();
  const {article, count} = Object.fromEntries(new FormData(event.target));
  send('shop.order', {article, count: Number(count)});
});
find('refund').addEventListener('click', () => send('shop.refund', {amount: 500}));
db.changes({since: 'now', live: true}).on('change', show);
show();
if (login()) connect();
// The page itself must be there without a network, too.
if ('serviceWorker' in navigator) navigator.serviceWorker.register('offline.js');
