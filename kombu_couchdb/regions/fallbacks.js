// Parcels that have another region to run in if they are not taken in time. An id is p:<to>:<from>:<tag>.
// Row: key = [from, when it is withdrawn], value = [revision, size of the document in characters].
function (doc) {
  var parts = doc._id.split(':');
  if (parts[0] !== 'p' || parts.length < 4 || doc.status || typeof doc.fallback !== 'string') return;
  var at = typeof doc.fallback_at === 'number' && isFinite(doc.fallback_at) ? doc.fallback_at : 0;
  emit([parts[2], at], [doc._rev, JSON.stringify(doc).length]);
}
