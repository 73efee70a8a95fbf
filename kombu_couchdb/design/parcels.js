// The parcels of a database for publishers: [0, published] of what is to be moved, [1, failed] of what was refused. The value is
// the revision and the size of the document in characters.
function (doc) {
  if (doc.type !== undefined && doc.type !== 'Parcel') return;
  var date = doc.status ? doc.failed : doc.published;
  emit([doc.status ? 1 : 0, typeof date === 'number' && isFinite(date) ? date : 0], [doc._rev, JSON.stringify(doc).length]);
}
