// Parcels in a database for publishers: the waiting ones, then the refused ones.
// Row: key = [0, published] or [1, failed], value = [revision, size of the document in characters].
function (doc) {
  if (doc.type !== undefined && doc.type !== 'Parcel') return;
  var date = doc.status ? doc.failed : doc.published;
  emit([doc.status ? 1 : 0, typeof date === 'number' && isFinite(date) ? date : 0], [doc._rev, JSON.stringify(doc).length]);
}
