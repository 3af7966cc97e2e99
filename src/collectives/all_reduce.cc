// Staged form: reduce-scatter and all-gather in one pipeline: while chunk t of the contributions is
// sent, chunk t - 1 is summed by the rank that owns it and chunk t - 2's results arrive. In one
// address space: only the owner of a shard accesses it, in any rank's tensor, so it sums all of
// them and writes the sum to all.
#include <cstring>
#include <vector>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/direct.h"
#include "collectives/gpu.h"
#include "collectives/reduce.h"
#include "collectives/rows/routes.h"
#include "core/operands.h"

namespace tandem {

using namespace collectives;

namespace {

void reduce_directly(Call& call, const Tensor& data, ReduceOp op) {
  Direct direct(call);
  const size_t element = size_of(data.dtype());
  const Shard local = shard_of(data.elements(), call.size(), call.rank());
  // Peers' shards of the data, then this one's sum to every peer.
  direct.enter(data.data(), data.bytes() + size_t(local.count) * element * size_t(call.size() - 2));
  std::vector<const std::byte*> sources(static_cast<size_t>(call.size()));
  const auto block = int64_t(kDirectBlock / element);
  for (int64_t i = 0; i < slices_in(local.count, block); ++i) {
    const Slice slice = slice_of(local.count, block, i);
    const size_t at = size_t(local.begin + slice.begin) * element;
    for (int r = 0; r < call.size(); ++r) sources[size_t(r)] = direct.of(r) + at;
    std::byte* sum = direct.of(call.rank()) + at;
    reduce(data.dtype(), op, sources, sum, slice.count);
    for (int step = 1; step < call.size(); ++step) {
      std::memcpy(direct.of(call.peer(step)) + at, sum, size_t(slice.count) * element);
    }
  }
  direct.finish();
}

}  // namespace

void all_reduce(Communicator& comm, const Tensor& data, ReduceOp op) {
  uncompressed_all_reduce(comm, data, op, {});
}

void collectives::uncompressed_all_reduce(Communicator& comm, const Tensor& data, ReduceOp op,
                                          const RequestedCall& asked) {
  require_writable("all_reduce", {"data", &data});
  if (gpu::is_gpu(comm)) return gpu::all_reduce(comm, data, op);
  require_contiguous("all_reduce", "data", data);
  require_reducible("all_reduce", data.dtype());
  if (comm.size() == 1) return;

  Args args(Op::all_reduce, data);
  args.reduce = op;
  args.wire = asked.wire;
  args.route = asked.route;
  Call call(comm, args, {.written = {"data", &data}});
  const int world = call.size(), me = call.rank();
  auto* bytes = data.as<std::byte>();
  std::vector<const std::byte*> sources(static_cast<size_t>(world));

  if (data.bytes() <= call.small()) {
    call.enter_all({bytes, data.bytes()});
    call.check();
    for (int r = 0; r < world; ++r) sources[size_t(r)] = r == me ? bytes : call.payload(r);
    reduce(data.dtype(), op, sources, bytes, data.elements());
    return;
  }

  if (call.one_address_space()) return reduce_directly(call, data, op);

  const Chunks chunks(call, data.elements(), size_of(data.dtype()));
  call.enter_all({});
  for (int64_t t = 0; t < chunks.steps() + 2; ++t) {
    for (int step = 1; step < world; ++step) {
      const int peer = call.peer(step);
      const Span chunk = chunks.at(peer, t);
      if (chunk.bytes) call.send(Stream::reduce, peer, bytes + chunk.begin, chunk.bytes);
    }
    if (t == 0) call.check();
    if (const Span local = chunks.at(me, t - 1); local.bytes) {
      receive_and_reduce(call, data.dtype(), op, bytes + local.begin, bytes + local.begin,
                         local.bytes);
      for (int step = 1; step < world; ++step) {
        call.send(Stream::gather, call.peer(step), bytes + local.begin, local.bytes);
      }
    }
    for (int step = 1; step < world; ++step) {
      const int source = call.peer(world - step);
      const Span chunk = chunks.at(source, t - 2);
      if (chunk.bytes) receive_into(call, Stream::gather, source, bytes + chunk.begin, chunk.bytes);
    }
  }
  call.finish();
}

}  // namespace tandem
