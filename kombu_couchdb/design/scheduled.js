// When something planned becomes due, whatever its priority.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  if (typeof doc.date === 'number') emit([name(doc.queue), doc.date], null);
}
