// All that a sweep needs in one read grouped by the first two parts of the key: who lives until when, who holds how many
// claims (and of which queues), when the first message expires, which queues may go, and which have limits.
function (doc) {
  function seconds(value) { return typeof value === 'number' ? value : 0; }
  if (doc.type === 'WorkItem' && !doc.status) {
    if (doc.claimed && typeof doc.claimed.by === 'string') emit(['claim', doc.claimed.by, doc.queue], seconds(doc.claimed.date));
    else if (typeof doc.expires === 'number') emit(['expiry', null], doc.expires);
  } else if (doc.type === 'Consumer') {
    emit(['consumer', doc._id], seconds(doc.expires));
  } else if (doc.type === 'Queue') {
    if (doc.expires) emit(['queue', doc.name], seconds(doc.expires));
    var limits = doc.arguments || {};
    if (typeof limits['x-message-ttl'] === 'number' || typeof limits['x-max-length'] === 'number') emit(['limit', doc.name], 0);
  }
}
