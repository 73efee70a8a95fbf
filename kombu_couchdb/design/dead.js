// Dead letters by queue and time, and WorkItems whose queue is not text: no other view shows those.
// Row: key = [encoded queue or null, time of the failure], value = reason.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem') return;
  if (doc.status) emit([name(doc.queue), doc.failed], doc.reason);
  else if (typeof doc.queue !== 'string') emit([null, 0], 'malformed: queue is not text');
}
