// All that a sweep needs in one read grouped by the first two parts of the key: who lives until when, who holds how many
// claims (and of which queues), when the first message expires, which queues may go, and which have limits. Numbers are kept
// small: _stats squares them, and one that is too large for that would leave nobody any view.
function (doc) {
  function name(queue) { return typeof queue === 'string' ? encodeURIComponent(queue) : queue; }
  function seconds(value) { return typeof value === 'number' ? Math.max(-1e12, Math.min(1e12, value)) : 0; }
  if (doc.type === 'WorkItem' && !doc.status) {
    var headers = doc.message && doc.message.headers || {};
    var announced = typeof headers.group === 'string' && typeof headers.expires === 'string';
    if (doc.claimed && typeof doc.claimed.by === 'string') emit(['claim', doc.claimed.by, name(doc.queue)], seconds(doc.claimed.date));
    else if (typeof doc.expires === 'number' && !announced) emit(['expiry', null], seconds(doc.expires));
  } else if (doc.type === 'Consumer') {
    emit(['consumer', doc._id], seconds(doc.expires));
  } else if (doc.type === 'Queue' && typeof doc.name === 'string') {
    if (doc.expires) emit(['queue', name(doc.name)], seconds(doc.expires));
    var limits = doc.arguments || {};
    if (typeof limits['x-message-ttl'] === 'number' || typeof limits['x-max-length'] === 'number') emit(['limit', name(doc.name)], 0);
  }
}
