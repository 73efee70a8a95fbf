'use strict';
// PouchDB behind express-pouchdb: in memory, one user, 127.0.0.1 only, for development and tests.
// The starter writes one line of JSON to stdin, {port, user, password}, and holds stdin open while it lives;
// the answer is one line of JSON on stdout, {port} or {error}.
const {createHash, randomBytes, timingSafeEqual} = require('crypto');
const {createInterface} = require('readline');
const express = require('express');
const {jsonParser, sendJSON} = require('express-pouchdb/lib/utils');
const couchRoutes = require('./routes');

const answer = (message, then) => process.stdout.write(`${JSON.stringify(message)}\n`, then);
const hash = text => createHash('sha256').update(text).digest();

function authorizer(user, password) {
  const expected = hash(`${user}:${password}`);
  const sessions = new Set();
  const refuse = (res, reason) => sendJSON(res, 401, {error: 'unauthorized', reason});
  const begin = (req, res) => {
    if (!timingSafeEqual(hash(`${req.body.name}:${req.body.password}`), expected)) {
      return refuse(res, 'Name or password is incorrect.');
    }
    const session = randomBytes(16).toString('hex');
    sessions.add(session);
    res.set('Set-Cookie', `AuthSession=${session}; Version=1; Max-Age=600; Path=/; HttpOnly`);
    sendJSON(res, 200, {ok: true, name: user, roles: ['_admin']});
  };
  return (req, res, next) => {
    req.headers.accept = 'application/json'; // express-pouchdb would answer text/plain otherwise
    const [scheme, credentials = ''] = (req.headers.authorization || '').split(' ');
    const given = scheme.toLowerCase() === 'basic' ? Buffer.from(credentials, 'base64').toString() : '';
    const [, session] = /\bAuthSession=(\w+)/.exec(req.headers.cookie) || [];
    if (req.method === 'POST' && req.path === '/_session') {
      return jsonParser(req, res, error => (error ? next(error) : begin(req, res)));
    }
    if (timingSafeEqual(hash(given), expected) || sessions.has(session)) {
      req.couchSession = {userCtx: {name: user, roles: ['_admin']}};
    } else if (given || !['GET', 'HEAD'].includes(req.method) || !['/', '/_up'].includes(req.path)) {
      return refuse(res, given ? 'Name or password is incorrect.' : 'Authentication required.');
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
