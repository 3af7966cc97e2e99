#include "collectives/chunks.h"

#include <cstring>
#include <vector>

#include "collectives/reduce.h"

namespace tandem::collectives {

void receive_into(Call& call, Stream stream, int source, std::byte* to, size_t bytes) {
  std::memcpy(to, call.receive(stream, source), bytes);
  call.release(stream, source);
}

void receive_and_reduce(Call& call, DType dtype, ReduceOp op, const std::byte* local,
                        std::byte* out, size_t bytes) {
  std::vector<const std::byte*> sources(static_cast<size_t>(call.size()));
  for (int r = 0; r < call.size(); ++r) {
    sources[size_t(r)] = r == call.rank() ? local : call.receive(Stream::reduce, r);
  }
  reduce(dtype, op, sources, out, int64_t(bytes / size_of(dtype)));
  for (int step = 1; step < call.size(); ++step) call.release(Stream::reduce, call.peer(step));
}

}  // namespace tandem::collectives
