'use strict';
// CouchDB's routes: those of express-pouchdb. Ours are registered before the routes that they replace.
const express = require('express');
const expressPouchDB = require('express-pouchdb');
const {jsonParser, sendCallback, sendError, sendJSON} = require('express-pouchdb/lib/utils');
const PouchDB = require('pouchdb-core');
const {createError, REV_CONFLICT} = require('pouchdb-errors');
const wrappers = require('pouchdb-wrappers');

PouchDB.plugin(require('pouchdb-adapter-memory'))
  .plugin(require('pouchdb-mapreduce'))
  .plugin(require('pouchdb-replication')); // express-pouchdb's security part wraps its methods

// GET and POST /db/_changes. The feed of express-pouchdb ends the process on an unknown filter, ignores `selector` and
// `timeout`, and continues after its client has disconnected.
async function changes(req, res) {
  const {db, query, body = {}} = req;
  const {feed = 'normal', heartbeat, timeout = 60e3} = query;
  const {doc_ids, selector} = body;
  const options = {...query, query_params: {...query}, doc_ids, selector};
  const read = since => new Promise((resolve, reject) => {
    db.changes({...options, since}).on('complete', resolve).on('error', reject);
  });
  let found = await read(query.since || 0);
  if (feed === 'normal' || (feed === 'longpoll' && found.results.length)) {
    return sendJSON(res, 200, found);
  }

  let written = true;
  let wake = () => {};
  const notify = () => { written = true; wake(); };
  const end = () => {
    clearInterval(timer);
    if (!res.writableEnded) {
      const lastSeq = JSON.stringify(found.last_seq);
      res.end(`${feed === 'longpoll' ? '],\n' : '{'}"last_seq":${lastSeq},"pending":0}\n`);
    }
  };
  const timer = heartbeat
    ? setInterval(() => res.write('\n'), heartbeat === true ? 60e3 : heartbeat)
    : setTimeout(end, Math.min(timeout, 60e3));
  db.on('written', notify).on('destroyed', end);
  res.emit('waits');
  res.on('close', () => {
    db.removeListener('written', notify).removeListener('destroyed', end);
    clearInterval(timer);
    notify();
  });
  res.type('application/json').write(feed === 'longpoll' ? '{"results":[\n' : '\n');
  while (!res.writableEnded && !res.destroyed) {
    if (found.results.length) {
      const changes = found.results.map(change => JSON.stringify(change));
      res.write(`${changes.join(feed === 'longpoll' ? ',\n' : '\n')}\n`);
      if (feed === 'longpoll') {
        return end();
      }
      timer.refresh();
    } else if (!written) {
      await new Promise(resolve => { wake = resolve; });
    }
    written = false;
    found = await read(found.last_seq);
  }
}

function queries(req, res) {
  const view = `${req.params.design}/${req.params.view}`;
  Promise.all(req.body.queries.map(query => req.db.query(view, {...req.query, ...query})))
    .then(results => sendJSON(res, 200, {results}), error => sendError(res, error));
}

// The deletion of a database waits for the responses to earlier requests, and later requests wait for the deletion.
// express-pouchdb does neither: a view would never respond, and a request that has found the database creates it anew.
function deleteAlone() {
  const databases = new Map();
  return (req, res, next) => {
    const {db} = req.params;
    if (!databases.has(db)) databases.set(db, {deleted: Promise.resolve(), responses: new Set()});
    const {deleted, responses} = databases.get(db);
    const response = new Promise(resolve => {
      // 'waits' is of a feed: it ends when the database is deleted.
      res.on('waits', resolve).on('close', resolve);
    }).then(() => { responses.delete(response); });
    let earlier = deleted;
    if (req.method === 'DELETE' && req.path === '/') {
      earlier = Promise.all(responses);
      databases.get(db).deleted = response;
    }
    responses.add(response);
    earlier.then(() => next());
  };
}

module.exports = () => {
  // Leave out the parts of express-pouchdb that write files: configuration and log.
  const include = ['routes/root', 'routes/all-dbs', 'routes/db'];
  const app = expressPouchDB({mode: 'custom', overrideMode: {include}});
  const add = names => names.forEach(name => require(`express-pouchdb/lib/routes/${name}`)(app));

  app.dbWrapper.registerWrapper((name, db, next) => {
    db.setMaxListeners(0);
    // An index that is brought up to date leaves out the documents that change meanwhile, so that views would show
    // neither their old nor their new rows: writes and views take turns.
    let last = Promise.resolve();
    const inTurn = original => {
      if (!db.taskqueue.isReady) return original(); // it calls the same method when the database is open
      last = last.then(original, original);
      return last;
    };
    const bulkDocs = original => inTurn(original).finally(() => db.emit('written'));
    wrappers.installWrapperMethods(db, {bulkDocs, query: inTurn});
    // PouchDB has no result for an update that arrives again when its document was deleted since, and would end the
    // process. CouchDB responds with a conflict.
    const store = db._bulkDocs;
    db._bulkDocs = (request, options, callback) => store.call(db, request, options, (error, results = []) => {
      callback(error, Array.from(results, result => result || createError(REV_CONFLICT)));
    });
    return next();
  });
  app.all('/:db/_changes', jsonParser, (req, res) => {
    changes(req, res).catch(error => (res.headersSent ? res.end() : sendError(res, error)));
  });
  app.post('/:db/_design/:design/_view/:view/queries', jsonParser, queries);
  add(['bulk-docs', 'bulk-get', 'all-docs', 'compact', 'revs-diff', 'security', 'view-cleanup']);
  add(['find', 'views', 'attachments']);
  const missing = {error: 'not_found', reason: 'missing'};
  app.all('/:db/:part(_[a-z_]+)', (req, res) => sendJSON(res, 404, missing));
  // Without a revision in the request, express-pouchdb would delete the current revision.
  app.delete('/:db/:id(*)', (req, res) => {
    req.db.remove(req.params.id, req.query.rev || '', sendCallback(res));
  });
  add(['documents', '404']);
  app.setPouchDB(PouchDB.defaults({adapter: 'memory'}));
  return express().use('/:db', deleteAlone()).use(app);
};
