// Results by state and time. Failures of the last hour: startkey=["FAILURE", now - 3600]&endkey=["FAILURE", {}].
// Row: key = [state, date, or 0 if that is no number], value = name of the task.
function (doc) {
  if (doc.type === 'Result') {
    emit([doc.status, typeof doc.date === 'number' ? doc.date : 0], doc.task);
  }
}
