#include "collectives/symmetric_workspace.h"

#include "comm/flow_spans.h"
#include "comm/workspace.h"
#include "observe/recorder.h"

namespace tandem {
namespace {
size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}
}  // namespace

OverlapWorkspace::OverlapWorkspace(Communicator& comm, std::string_view op, size_t shared_bytes,
                                   size_t private_bytes, int signals)
    : comm_(comm),
      op_(op),
      shared_bytes_(aligned(shared_bytes)),
      private_bytes_(aligned(private_bytes)),
      buffer_(comm.allocate(2 * shared_bytes_, signals)),
      private_(2 * private_bytes_),
      stream_(make_flow_stream(comm)) {}

OverlapWorkspace::~OverlapWorkspace() {
  try {
    comm_.flush();
  } catch (const Error&) {
    // The world has failed; the transport releases its sources before it reports that.
  }
}

void OverlapWorkspace::put(int peer, size_t offset, const void* source, size_t bytes, int signal) {
  comm_.workspace().bytes_sent += bytes;
  const ScopedSend span(comm_, op_.data(), -1, peer, stream_, message(signal));
  comm_.put(peer, *buffer_, shared_offset() + offset, source, bytes, signal, epoch_);
}

void OverlapWorkspace::await(int signal, int peer, int64_t tile) {
  if (has(signal)) return;
  const ScopedSpan span(SpanKind::wait, op_.data(), int(tile),
                        receive_from(comm_, peer, stream_, message(signal)));
  comm_.wait(*buffer_, signal, epoch_, {op_, peer, tile});
}

void OverlapWorkspace::flush() {
  const ScopedSpan span(SpanKind::wait, op_.data());
  comm_.flush();
}

}  // namespace tandem
