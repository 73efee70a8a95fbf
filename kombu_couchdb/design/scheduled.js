// When something planned becomes due, whatever its priority.
function (doc) {
  if (doc.type !== 'WorkItem' || doc.claimed || doc.status) return;
  if (typeof doc.date === 'number') emit([doc.queue, doc.date], null);
}
