// Results by state and time. Failures of the last hour: startkey=["FAILURE", now - 3600]&endkey=["FAILURE", {}].
// Row: key = [state, date], value = name of the task.
function (doc) {
  if (doc.type === 'Result') {
    emit([doc.status, doc.date], doc.task);
  }
}
