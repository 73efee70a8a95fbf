// What can be claimed, now or when it is due: one range read gives the next items of a queue.
// A spoilt item comes first, so that the consumer which meets it sets it aside.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  var rank = typeof doc.priority === 'number' ? 9 - Math.max(0, Math.min(9, Math.floor(doc.priority))) : 9;
  var date = doc.date === null || doc.date === undefined ? doc.published : doc.date;
  emit([name(doc.queue), rank, typeof date === 'number' ? date : 0], null);
}
