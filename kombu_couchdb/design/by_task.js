// WorkItems and DoneItems by task id, including messages that wait behind a running unique job.
// Row: key = task id, value = null.
function (doc) {
  function task(message) { return message && message.headers && message.headers.id; }
  if (doc.type !== 'WorkItem' && doc.type !== 'DoneItem') return;
  if (typeof task(doc.message) === 'string') emit(task(doc.message), null);
  (Array.isArray(doc.next) ? doc.next : []).forEach(function (next) {
    if (next && typeof task(next.message) === 'string') emit(task(next.message), null);
  });
}
