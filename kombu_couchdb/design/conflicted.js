// Documents of which several leaves were left behind, by a cluster or by replication, with the revisions of all. Of a WorkItem
// a deleted leaf counts, too: it may say that the item is done.
function (doc) {
  var deleted = doc.type === 'WorkItem' && doc._deleted_conflicts || [];
  if (typeof doc.type === 'string' && (doc._conflicts || deleted.length)) {
    emit(doc.type, [doc._rev].concat(doc._conflicts || [], deleted));
  }
}
