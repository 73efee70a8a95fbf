'use strict';
// The embedded server: PouchDB in memory behind express-pouchdb, with one user, on 127.0.0.1 only.
// The starting process writes one line of JSON to stdin, {port, user, password}, and keeps stdin open.
// This process responds with one line of JSON on stdout, {port} or {error}, and ends when stdin is closed.
const {createHash, randomBytes, timingSafeEqual} = require('crypto');
const {createInterface} = require('readline');
const express = require('express');
const {jsonParser, sendJSON} = require('express-pouchdb/lib/utils');
const couchRoutes = require('./routes');

const respond = (message, then) => process.stdout.write(`${JSON.stringify(message)}\n`, then);
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
    req.headers.accept = 'application/json'; // otherwise express-pouchdb responds with text/plain
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

// CORS: pages of this machine may use the server, if they know the password.
function allowLocalPages(req, res, next) {
  const {origin} = req.headers;
  if (!/^http:\/\/(localhost|127\.0\.0\.1)(:\d+)?$/.test(origin || '')) return next();
  res.set({
    'Access-Control-Allow-Origin': origin,
    'Access-Control-Allow-Credentials': 'true',
    'Access-Control-Allow-Headers': 'accept, authorization, content-type, origin, referer',
    'Access-Control-Allow-Methods': 'GET, PUT, POST, HEAD, DELETE',
    Vary: 'Origin',
  });
  return req.method === 'OPTIONS' ? res.status(204).end() : next();
}

function serve({port, user, password}) {
  const app = express().use(allowLocalPages, authorizer(user, password));
  app.get('/_up', (req, res) => sendJSON(res, 200, {status: 'ok'}));
  app.get('/_session', (req, res) => sendJSON(res, 200, {ok: true, ...req.couchSession}));
  app.use(couchRoutes());
  const server = app.listen(port, '127.0.0.1', () => respond({port: server.address().port}));
  server.on('error', error => respond({error: error.message}, () => process.exit(1)));
  server.keepAliveTimeout = 300e3; // as in CouchDB; Node's default of 5 s would close connections in a client's pool
}

console.log = console.error; // nobody reads stdout after the response
const starter = process.ppid;
// End with the starting process even if a forked child of it keeps stdin open.
setInterval(() => process.ppid === starter || process.exit(), 1000);
createInterface({input: process.stdin})
  .once('line', line => serve(JSON.parse(line)))
  .once('close', () => process.exit());
