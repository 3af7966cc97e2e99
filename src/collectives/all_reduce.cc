// Reduce-scatter and all-gather in one pipeline: while chunk t of the contributions leaves, chunk
// t - 1 is summed by the rank that owns it and chunk t - 2's results arrive.
#include <vector>

#include "collectives/call.h"
#include "collectives/chunks.h"
#include "collectives/reduce.h"

namespace tandem {

using namespace collectives;

void all_reduce(Communicator& comm, const Tensor& data, ReduceOp op) {
  require_plain("all_reduce", "data", data);
  require_reducible("all_reduce", data.dtype());
  if (comm.size() == 1) return;

  Args args(Op::all_reduce, data);
  args.reduce = op;
  Call call(comm, args);
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

  const Chunks chunks(call, data.elements(), size_of(data.dtype()));
  call.enter_all({});
  for (int64_t t = 0; t < chunks.steps() + 2; ++t) {
    for (int step = 1; step < world; ++step) {
      const int peer = call.peer(step);
      const Span chunk = chunks.at(peer, t);
      if (chunk.bytes) call.send(Stream::reduce, peer, bytes + chunk.begin, chunk.bytes);
    }
    if (t == 0) call.check();
    if (const Span own = chunks.at(me, t - 1); own.bytes) {
      receive_and_reduce(call, data.dtype(), op, bytes + own.begin, bytes + own.begin, own.bytes);
      for (int step = 1; step < world; ++step) {
        call.send(Stream::gather, call.peer(step), bytes + own.begin, own.bytes);
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
