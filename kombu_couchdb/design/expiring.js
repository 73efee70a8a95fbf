// Messages that no consumer holds and that expire at a certain time, and those that are kept until then: completed ones,
// and those whose task failed. Tasks of Celery with a header `expires` are left out: they are delivered although they
// have expired, and the worker marks them as revoked.
// Row: key = time of the expiry, value = revision.
function (doc) {
  var kept = doc.type === 'DoneItem' || (doc.type === 'WorkItem' && doc.status && doc.error);
  if (kept && typeof doc.expires === 'number') emit(doc.expires, doc._rev);
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  var headers = doc.message && doc.message.headers || {};
  if (typeof headers.id === 'string' && typeof headers.expires === 'string') return;
  if (typeof doc.expires === 'number') emit(doc.expires, doc._rev);
}
