#include <cstring>
#include <vector>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/direct.h"
#include "collectives/gpu.h"
#include "collectives/reduce.h"
#include "collectives/rows/routes.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, ReduceOp op) {
  uncompressed_reduce_scatter(comm, data, shard, op, {});
}

void collectives::uncompressed_reduce_scatter(Communicator& comm, const Tensor& data,
                                              const Tensor& shard, ReduceOp op,
                                              const RequestedCall& asked) {
  require_writable("reduce_scatter", {"shard", &shard});
  if (gpu::is_gpu(comm)) return gpu::reduce_scatter(comm, data, shard, op);
  require_contiguous("reduce_scatter", "data", data);
  require_contiguous("reduce_scatter", "shard", shard);
  require_reducible("reduce_scatter", data.dtype());
  require_shard("reduce_scatter", comm, shard, data);
  require_shard_position("reduce_scatter", comm, shard, {"data", &data});

  const size_t row = row_bytes(data);
  const auto at = [&](int r) {
    const Shard rows = shard_of(data.dim(0), comm.size(), r);
    return Span{size_t(rows.begin) * row, size_t(rows.count) * row};
  };
  const auto* bytes = data.as<const std::byte>();
  auto* out = shard.as<std::byte>();
  const Span local = at(comm.rank());
  if (comm.size() == 1) {
    if (local.bytes && out != bytes) std::memmove(out, bytes, local.bytes);
    return;
  }

  Args args(Op::reduce_scatter, data);
  args.reduce = op;
  args.wire = asked.wire;
  args.route = asked.route;
  Call call(comm, args, {.written = {"shard", &shard}, .read = {"data", &data}});
  const int world = call.size(), me = call.rank();
  if (at(0).bytes <= call.small()) {
    for (int step = 1; step < world; ++step) {
      const int peer = call.peer(step);
      call.enter(peer, {bytes + at(peer).begin, at(peer).bytes});
    }
    call.check();
    std::vector<const std::byte*> sources(static_cast<size_t>(world));
    for (int r = 0; r < world; ++r) {
      sources[size_t(r)] = r == me ? bytes + local.begin : call.payload(r);
    }
    reduce(data.dtype(), op, sources, out, shard.elements());
    return;
  }

  if (call.one_address_space()) {
    Direct direct(call);
    direct.enter(bytes, data.bytes() - local.bytes);
    std::vector<const std::byte*> sources;
    for (int r = 0; r < world; ++r) sources.push_back(direct.of(r) + local.begin);
    reduce(data.dtype(), op, sources, out, shard.elements());
    return direct.finish();
  }

  const Chunks chunks(call, data.dim(0), row);
  call.enter_all({});
  for (int64_t t = 0; t < chunks.steps() + 1; ++t) {
    for (int step = 1; step < world; ++step) {
      const int peer = call.peer(step);
      const Span chunk = chunks.at(peer, t);
      if (chunk.bytes) call.send(Stream::reduce, peer, bytes + chunk.begin, chunk.bytes);
    }
    if (t == 0) call.check();
    if (const Span chunk = chunks.at(me, t - 1); chunk.bytes) {
      receive_and_reduce(call, data.dtype(), op, bytes + chunk.begin,
                         out + (chunk.begin - local.begin), chunk.bytes);
    }
  }
  call.finish();
}

}  // namespace tandem
