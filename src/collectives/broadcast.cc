// The root scatters the tensor and every rank forwards its shard, so that no link carries much more
// than the tensor once, whatever the number of ranks.
#include <fmt/format.h>

#include <cstring>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/direct.h"
#include "collectives/gpu.h"
#include "core/operands.h"

namespace tandem {

using namespace collectives;

namespace {

void send_all(Call& call, const Chunks& chunks, const std::byte* bytes, int64_t t) {
  const Span local = chunks.at(call.rank(), t);
  for (int step = 1; step < call.size(); ++step) {
    const int peer = call.peer(step);
    const Span remote = chunks.at(peer, t);
    if (remote.bytes) call.send(Stream::reduce, peer, bytes + remote.begin, remote.bytes);
    if (local.bytes) call.send(Stream::gather, peer, bytes + local.begin, local.bytes);
  }
}

void receive_and_forward(Call& call, const Chunks& chunks, std::byte* bytes, int64_t t, int root) {
  const Span local = chunks.at(call.rank(), t);
  if (local.bytes) {
    receive_into(call, Stream::reduce, root, bytes + local.begin, local.bytes);
    for (int step = 1; step < call.size(); ++step) {
      const int peer = call.peer(step);
      if (peer != root) call.send(Stream::gather, peer, bytes + local.begin, local.bytes);
    }
  }
  for (int step = 1; step < call.size(); ++step) {
    const int source = call.peer(step);
    const Span chunk = chunks.at(source, t - 1);
    if (chunk.bytes) receive_into(call, Stream::gather, source, bytes + chunk.begin, chunk.bytes);
  }
}

}  // namespace

void broadcast(Communicator& comm, const Tensor& data, int root) {
  if (comm.rank() != root) require_writable("broadcast", {"data", &data});
  if (gpu::is_gpu(comm)) return gpu::broadcast(comm, data, root);
  require_contiguous("broadcast", "data", data);
  if (root < 0 || root >= comm.size()) {
    throw InvalidArgument(
        fmt::format("broadcast: root {}: expected 0 to {}", root, comm.size() - 1));
  }
  if (comm.size() == 1) return;

  Args args(Op::broadcast, data);
  args.root = root;
  const bool is_root = comm.rank() == root;
  const Operand all{"data", &data};
  Call call(comm, args, is_root ? Uses{.read = all} : Uses{.written = all});
  auto* bytes = data.as<std::byte>();
  if (data.bytes() <= call.small()) {
    call.enter_all({bytes, is_root ? data.bytes() : 0});
    call.check();
    if (!is_root && data.bytes()) std::memcpy(bytes, call.payload(root), data.bytes());
    return;
  }

  if (call.one_address_space()) {
    Direct direct(call);
    direct.enter(bytes, is_root ? size_t(call.size() - 1) * data.bytes() : 0);
    if (!is_root) std::memcpy(bytes, direct.of(root), data.bytes());
    return direct.finish();
  }

  const Chunks chunks(call, int64_t(data.bytes()), 1);
  call.enter_all({});
  if (!is_root) call.check();
  for (int64_t t = 0; t < chunks.steps() + 1; ++t) {
    if (!is_root) {
      receive_and_forward(call, chunks, bytes, t, root);
      continue;
    }
    send_all(call, chunks, bytes, t);
    if (t == 0) call.check();
  }
  call.finish();
}

}  // namespace tandem
