// What can be claimed, now or when it is due: [queue, 9 - priority, published] of what is due at once, [queue, 10, date] of what is
// planned; the value is the same 9 - priority, and the revision. No clock decides what stands at which place: only what is
// planned is read up to a time. A spoilt item comes first, so that the consumer which meets it sets it aside.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  var rank = typeof doc.priority === 'number' ? 9 - Math.max(0, Math.min(9, Math.floor(doc.priority))) : 9;
  if (typeof doc.date === 'number') {
    emit([name(doc.queue), 10, doc.date], [rank, doc._rev]);
  } else {
    var sound = (doc.date === null || doc.date === undefined) && typeof doc.published === 'number';
    emit([name(doc.queue), rank, sound ? doc.published : 0], [rank, doc._rev]);
  }
}
