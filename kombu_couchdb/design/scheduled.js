// When something planned becomes due, whatever its priority.
function (doc) {
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  if (typeof doc.date === 'number') emit([doc.queue, doc.date], null);
}
