// A message is one or more chunks of the pair stream; its first slot starts with a header.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "collectives/call.h"
#include "collectives/gpu.h"
#include "comm/flow_spans.h"
#include "core/operands.h"

namespace tandem {

using namespace collectives;

namespace {

struct MessageHeader {
  DType dtype;
  int64_t elements;
  /// Sender's memory; empty in another process. A sender whose message fits into the slots may have
  /// freed it since.
  ByteRange range = {};
  size_t bytes() const { return size_t(elements) * size_of(dtype); }
  bool operator==(const MessageHeader& other) const {
    return dtype == other.dtype && elements == other.elements;
  }
  /// A message received into its own source memory arrives unchanged.
  bool would_change(const ByteRange& to) const { return range.overlaps(to) && range != to; }
  std::string describe() const {
    return fmt::format("{} elements of {}", elements, tandem::name_of(dtype));
  }
};

// Guard for a message's chunks: if the remaining ones were missing, the next message's would be
// taken for them.
struct ChunkGuard {
  Progress& progress;
  bool missing = false;
  explicit ChunkGuard(Progress& of_rank) : progress(of_rank) { progress.require_even(); }
  ~ChunkGuard() {
    if (missing) progress.end("a message has not gone whole");
  }
};

void require_peer(const char* op, const Communicator& comm, int peer) {
  if (peer < 0 || peer >= comm.size() || peer == comm.rank()) {
    throw InvalidArgument(fmt::format("{}: peer {} on rank {}: expected another rank, 0 to {}", op,
                                      peer, comm.rank(), comm.size() - 1));
  }
}

}  // namespace

void send(Communicator& comm, const Tensor& data, int peer) {
  if (gpu::is_gpu(comm)) return gpu::send(comm, data, peer);
  require_contiguous("send", "data", data);
  require_peer("send", comm, peer);
  Workspace& space = comm.workspace();
  const WorkspaceLayout& layout = space.layout;
  uint64_t& sent = space.at(Stream::pair, peer).sent;
  const ScopedSpan span(SpanKind::wait, "send", -1,
                        pair_message(comm, FlowRole::send, peer, int64_t(sent)));
  ChunkGuard guard(space.progress);
  const int signal = layout.arrived(Stream::pair, comm.rank());
  MessageHeader header{data.dtype(), data.elements()};
  if (space.reach != Reach::no_addresses) header.range = byte_range(data);
  size_t at = 0;
  do {
    if (sent >= uint64_t(layout.slots)) {
      comm.wait(*space.buffer, layout.freed(Stream::pair, peer), sent + 1 - uint64_t(layout.slots),
                {"send", peer});
    }
    if (at == 0) {  // raises no signal: the following chunk does
      comm.put(peer, *space.buffer, layout.pair_header_at(comm.rank(), sent), &header,
               sizeof header, signal, sent);
    }
    const size_t bytes = std::min(layout.slot_bytes, data.bytes() - at);
    const size_t offset = layout.slot_at(Stream::pair, comm.rank(), sent);
    ++sent;
    space.bytes_sent += bytes;
    comm.put(peer, *space.buffer, offset, data.as<std::byte>() + at, bytes, signal, sent);
    at += bytes;
    guard.missing = at < data.bytes();
  } while (guard.missing);
  comm.flush();
}

void recv(Communicator& comm, const Tensor& data, int peer) {
  require_writable("recv", {"data", &data});
  if (gpu::is_gpu(comm)) return gpu::recv(comm, data, peer);
  require_contiguous("recv", "data", data);
  require_peer("recv", comm, peer);
  Workspace& space = comm.workspace();
  const WorkspaceLayout& layout = space.layout;
  uint64_t& received = space.at(Stream::pair, peer).received;
  const ScopedSpan span(SpanKind::wait, "recv", -1,
                        pair_message(comm, FlowRole::receive, peer, int64_t(received)));
  ChunkGuard guard(space.progress);
  const MessageHeader expected{data.dtype(), data.elements()};
  MessageHeader header = expected;
  const ByteRange to = byte_range(data);
  bool is_shared = false;  // the peer may still be reading from memory that is written here
  size_t at = 0;
  do {
    comm.wait(*space.buffer, layout.arrived(Stream::pair, peer), received + 1, {"recv", peer});
    if (at == 0) {
      std::memcpy(&header, space.buffer->local() + layout.pair_header_at(peer, received),
                  sizeof header);
      const size_t chunks = (header.bytes() + layout.slot_bytes - 1) / layout.slot_bytes;
      is_shared = header.would_change(to) && chunks > size_t(layout.slots);
      if (header.would_change(to) && !is_shared) {  // the peer needs no slot that is freed here
        comm.wait(*space.buffer, layout.arrived(Stream::pair, peer),
                  received + std::max<size_t>(1, chunks), {"recv", peer});
      }
    }
    const size_t bytes = std::min(layout.slot_bytes, header.bytes() - at);
    if (bytes && header == expected && !is_shared) {
      std::memcpy(data.as<std::byte>() + at,
                  space.buffer->local() + layout.slot_at(Stream::pair, peer, received), bytes);
    }
    ++received;
    comm.put(peer, *space.buffer, 0, nullptr, 0, layout.freed(Stream::pair, comm.rank()), received);
    at += bytes;
    guard.missing = at < header.bytes();
  } while (guard.missing);
  if (header != expected) {
    throw Mismatch(fmt::format("recv: rank {} sends {}, rank {} expects {}", peer,
                               header.describe(), comm.rank(), expected.describe()));
  }
  if (is_shared) {
    throw InvalidArgument(fmt::format(
        "recv: data of rank {} at [{:#x}, {:#x}) overlaps data of rank {} at [{:#x}, {:#x}): "
        "expected memory of its own for each rank",
        comm.rank(), to.begin, to.end, peer, header.range.begin, header.range.end));
  }
}

}  // namespace tandem
