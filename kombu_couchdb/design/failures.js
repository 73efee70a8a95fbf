// Dead letters by time: all of them, those of each task, and those of each task with one type of error: that of the
// exception, or else the kind of the reason. With group_level=3 of the latter: their number, and when the first and the
// last of them failed. Texts and numbers are bounded: _stats squares the numbers, and an overflow would break the whole
// view.
// Rows: ['date', time], ['task', name of the task or null, time] and ['group', name of the task or null, error, time] =
// time of the failure.
function (doc) {
  function seconds(value) { return typeof value === 'number' ? Math.max(-1e12, Math.min(1e12, value)) : 0; }
  if (doc.type !== 'WorkItem' || (!doc.status && typeof doc.queue === 'string')) return;
  var name = doc.message && doc.message.headers && doc.message.headers.task;
  var task = typeof name === 'string' && name.length <= 255 ? name : null;
  var kind = typeof doc.reason === 'string' && /^(KINDS)/.exec(doc.reason);
  var type = doc.error && typeof doc.error.type === 'string' && doc.error.type.length <= 255 ? doc.error.type : null;
  var date = seconds(doc.failed);
  emit(['date', date], date);
  emit(['task', task, date], date);
  emit(['group', task, doc.status ? (type !== null ? type : kind ? kind[1] : 'other') : 'malformed', date], date);
}
