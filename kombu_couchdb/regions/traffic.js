// Parcels between regions: the waiting ones, then the refused ones. An id is p:<to>:<from>:<tag>.
// Row: key = [0, to, from, published] or [1, to, from, failed], value = [revision, size of the document in characters].
function (doc) {
  var parts = doc._id.split(':');
  if (parts[0] !== 'p' || parts.length < 4) return;
  var date = doc.status ? doc.failed : doc.published;
  date = typeof date === 'number' && isFinite(date) ? date : 0;
  emit([doc.status ? 1 : 0, parts[1], parts[2], date], [doc._rev, JSON.stringify(doc).length]);
}
