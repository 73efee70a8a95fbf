// Dead letters by queue and time; a WorkItem without a readable queue would be seen nowhere else.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  if (doc.type !== 'WorkItem') return;
  if (doc.status) emit([name(doc.queue), doc.failed], doc.reason);
  else if (typeof doc.queue !== 'string') emit([null, 0], 'malformed: queue is not text');
}
