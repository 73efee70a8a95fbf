// Messages that can be claimed now or when they are due. Ready ones are sorted by priority and date of publication,
// scheduled ones by due date, after the ready ones. No clock decides about the order of rows: consumers read the
// scheduled ones up to the current time. A malformed item comes first, so that the next consumer meets it and dead-
// letters it. Messages that wait for a slot of their concurrency key are the last ones, and not claimed from here.
// Rows: [encoded queue, HIGHEST - priority, published] or [encoded queue, PLANNED, due date] or [encoded queue, PARKED,
// either date] = [HIGHEST - priority, revision].
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem' || doc.status || (doc.claimed && typeof doc.claimed.by === 'string')) return;
  var rank = typeof doc.priority === 'number' ? HIGHEST - Math.max(0, Math.min(HIGHEST, Math.floor(doc.priority))) : HIGHEST;
  if (doc.parked && typeof doc.parked.key === 'string') {
    var date = typeof doc.date === 'number' ? doc.date : doc.published;
    emit([name(doc.queue), PARKED, typeof date === 'number' ? date : 0], [rank, doc._rev]);
  } else if (typeof doc.date === 'number') {
    emit([name(doc.queue), PLANNED, doc.date], [rank, doc._rev]);
  } else {
    var sound = (doc.date === null || doc.date === undefined) && typeof doc.published === 'number';
    emit([name(doc.queue), rank, sound ? doc.published : 0], [rank, doc._rev]);
  }
}
