'use strict';
// PouchDB behind express-pouchdb: in memory, one user, 127.0.0.1 only, for development and tests.
// The starter writes one line of JSON to stdin, {port, user, password}, and holds stdin open while it lives;
// the answer is one line of JSON on stdout, {port} or {error}.
const {createHash, timingSafeEqual} = require('crypto');
const {createInterface} = require('readline');
const express = require('express');
const {sendJSON} = require('express-pouchdb/lib/utils');
const couchRoutes = require('./routes');

const answer = (message, then) => process.stdout.write(`${JSON.stringify(message)}\n`, then);
const hash = text => createHash('sha256').update(text).digest();

function authorizer(user, password) {
  const expected = hash(`${user}:${password}`);
  return (req, res, next) => {
    req.headers.accept = 'application/json'; // express-pouchdb would answer text/plain otherwise
    const [scheme, credentials = ''] = (req.headers.authorization || '').split(' ');
    const given = scheme.toLowerCase() === 'basic' ? Buffer.from(credentials, 'base64').toString() : '';
    if (timingSafeEqual(hash(given), expected)) {
      req.couchSession = {userCtx: {name: user, roles: ['_admin']}};
    } else if (given || !['/', '/_up'].includes(req.path)) {
      const reason = given ? 'Name or password is incorrect.' : 'Authentication required.';
      return sendJSON(res, 401, {error: 'unauthorized', reason});
    }
    next();
  };
}

function serve({port, user, password}) {
  const app = express().use(authorizer(user, password));
  app.get('/_up', (req, res) => sendJSON(res, 200, {status: 'ok'}));
  app.get('/_session', (req, res) => sendJSON(res, 200, {ok: true, ...req.couchSession}));
  app.use(couchRoutes());
  const server = app.listen(port, '127.0.0.1', () => answer({port: server.address().port}));
  server.on('error', error => answer({error: error.message}, () => process.exit(1)));
  server.keepAliveTimeout = 300e3; // as CouchDB; Node's 5 s would close connections that a pool still holds
}

console.log = console.error; // nobody reads stdout after the answer
const starter = process.ppid;
// A forked child of the starter may still hold the other end of stdin when the starter is gone.
setInterval(() => process.ppid === starter || process.exit(), 1000);
createInterface({input: process.stdin})
  .once('line', line => serve(JSON.parse(line)))
  .once('close', () => process.exit());
