// Failed results by the name of their task, the type of the exception and time. With group_level=2: the number of
// failures of each task and type, and when the first and the last of them were stored. Texts and numbers are bounded:
// _stats squares the numbers, and an overflow would break the whole view.
// Row: key = [name of the task or null, type of the exception or null, date], value = date.
function (doc) {
  function short(value) { return typeof value === 'string' && value.length <= 255 ? value : null; }
  if (doc.type === 'Result' && doc.status === 'FAILURE') {
    var date = typeof doc.date === 'number' ? Math.max(-1e12, Math.min(1e12, doc.date)) : 0;
    emit([short(doc.task), short(doc.error), date], date);
  }
}
