// What nobody holds and will not be delivered after a certain time. A task of a group is delivered all the same: Celery counts
// it. The value is the revision.
function (doc) {
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  var headers = doc.message && doc.message.headers || {};
  if (typeof headers.group === 'string' && typeof headers.expires === 'string') return;
  if (typeof doc.expires === 'number') emit(doc.expires, doc._rev);
}
