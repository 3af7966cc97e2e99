#include <fmt/format.h>

#include <cstring>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/direct.h"
#include "collectives/gpu.h"
#include "collectives/rows/routes.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out) {
  uncompressed_all_gather(comm, shard, out, {});
}

void collectives::uncompressed_all_gather(Communicator& comm, const Tensor& shard,
                                          const Tensor& out, const RequestedCall& asked) {
  require_writable("all_gather", {"out", &out});
  if (gpu::is_gpu(comm)) return gpu::all_gather(comm, shard, out);
  require_contiguous("all_gather", "shard", shard);
  require_contiguous("all_gather", "out", out);
  require_shard("all_gather", comm, shard, out);
  require_shard_position("all_gather", comm, shard, {"out", &out});

  const size_t row = row_bytes(out);
  const auto at = [&](int r) {
    const Shard rows = shard_of(out.dim(0), comm.size(), r);
    return Span{size_t(rows.begin) * row, size_t(rows.count) * row};
  };
  auto* bytes = out.as<std::byte>();
  const auto* local = shard.as<const std::byte>();
  const auto keep_local = [&] {
    const Span local_span = at(comm.rank());
    if (local_span.bytes && bytes + local_span.begin != local)
      std::memmove(bytes + local_span.begin, local, local_span.bytes);
  };
  if (comm.size() == 1) return keep_local();

  Args args(Op::all_gather, out);
  args.wire = asked.wire;
  args.route = asked.route;
  Call call(comm, args, {.written = {"out", &out}, .read = {"shard", &shard}});
  const int world = call.size(), me = call.rank();
  if (at(0).bytes <= call.small()) {
    call.enter_all({local, shard.bytes()});
    call.check();
    keep_local();
    for (int r = 0; r < world; ++r) {
      if (r != me && at(r).bytes) std::memcpy(bytes + at(r).begin, call.payload(r), at(r).bytes);
    }
    return;
  }

  if (call.one_address_space()) {
    Direct direct(call);
    direct.enter(local, size_t(world - 1) * shard.bytes());
    keep_local();
    for (int step = 1; step < world; ++step) {
      const int source = call.peer(step);
      if (at(source).bytes) {
        std::memcpy(bytes + at(source).begin, direct.of(source), at(source).bytes);
      }
    }
    return direct.finish();
  }

  const Chunks chunks(call, out.dim(0), row);
  call.enter_all({});
  for (int64_t t = 0; t < chunks.steps() + 1; ++t) {
    if (const Span chunk = chunks.at(me, t); chunk.bytes) {
      for (int step = 1; step < world; ++step) {
        call.send(Stream::gather, call.peer(step), local + (chunk.begin - at(me).begin),
                  chunk.bytes);
      }
    }
    if (t == 0) {
      call.check();
      keep_local();
    }
    for (int step = 1; step < world; ++step) {
      const int source = call.peer(world - step);
      const Span chunk = chunks.at(source, t - 1);
      if (chunk.bytes) receive_into(call, Stream::gather, source, bytes + chunk.begin, chunk.bytes);
    }
  }
  call.finish();
}

}  // namespace tandem
