// WorkItems and DoneItems by the time of the last thing that happened to them: published, failed or finished; all of
// them, and again by the name of their task.
// Rows: key = ['', time] and [name of the task, time], value = null.
function (doc) {
  if (doc.type !== 'WorkItem' && doc.type !== 'DoneItem') return;
  var task = doc.message && doc.message.headers && doc.message.headers.task;
  var date = [doc.finished, doc.failed, doc.published].filter(function (one) { return typeof one === 'number'; })[0] || 0;
  emit(['', date], null);
  if (typeof task === 'string' && task) emit([task, date], null);
}
