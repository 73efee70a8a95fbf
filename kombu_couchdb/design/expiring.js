// What nobody holds and will not be delivered after a certain time; the value is the revision.
function (doc) {
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  if (typeof doc.expires === 'number') emit(doc.expires, doc._rev);
}
