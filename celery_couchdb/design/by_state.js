// Results by state and time: the failures of the last hour are startkey=["FAILURE", now - 3600]&endkey=["FAILURE", {}].
function (doc) {
  if (doc.type === 'Result') {
    emit([doc.status, doc.date], doc.task);
  }
}
