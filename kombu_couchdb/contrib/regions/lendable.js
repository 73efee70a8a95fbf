// Messages that may run in any region and that no consumer has claimed yet, and those that are being lent.
// Rows: key = [encoded queue, when it became ready] or [null, when it was lent], value = null.
function (doc) {
  function seconds(value) { return typeof value === 'number' ? value : 0; }
  if (doc.type === 'LentItem') emit([null, seconds(doc.lent)], null);
  if (doc.type !== 'WorkItem' || doc.status || doc.claimed || doc.parked || doc.attempts || doc.key) return;
  var properties = doc.message && doc.message.properties || {};
  if (properties.region !== 'any' || typeof doc.queue !== 'string') return;
  emit([encodeURIComponent(doc.queue), Math.max(seconds(doc.published), seconds(doc.date))], null);
}
