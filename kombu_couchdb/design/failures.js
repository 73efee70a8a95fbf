// Dead letters by time, and by the name of their task, the kind of their reason and time. With group_level=3 of the
// latter: the number of dead letters of each task and kind, and when the first and the last of them failed. Texts and
// numbers are bounded: _stats squares the numbers, and an overflow would break the whole view.
// Rows: ['date', time of the failure] and ['group', name of the task or null, kind, time of the failure] = that time.
function (doc) {
  function seconds(value) { return typeof value === 'number' ? Math.max(-1e12, Math.min(1e12, value)) : 0; }
  if (doc.type !== 'WorkItem' || (!doc.status && typeof doc.queue === 'string')) return;
  var task = doc.message && doc.message.headers && doc.message.headers.task;
  var kind = typeof doc.reason === 'string' && /^(malformed|rejected|delivery limit)/.exec(doc.reason);
  var date = seconds(doc.failed);
  emit(['date', date], date);
  emit([
    'group',
    typeof task === 'string' && task.length <= 255 ? task : null,
    doc.status ? (kind ? kind[1] : 'other') : 'malformed',
    date
  ], date);
}
