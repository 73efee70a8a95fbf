// Documents with several leaf revisions, which a cluster or a replication left. For a WorkItem deleted leaves count,
// too: such a leaf may say that the message was acknowledged.
// Row: key = type of the document, value = [winning revision, …other leaf revisions].
function (doc) {
  var deleted = doc.type === 'WorkItem' && doc._deleted_conflicts || [];
  if (typeof doc.type === 'string' && (doc._conflicts || deleted.length)) {
    emit(doc.type, [doc._rev].concat(doc._conflicts || [], deleted));
  }
}
