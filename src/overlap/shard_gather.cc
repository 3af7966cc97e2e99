#include "overlap/shard_gather.h"

#include "observe/recorder.h"
#include "overlap/reduce.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

ShardGather::ShardGather(Communicator& comm, std::string_view op, int64_t m, int64_t k, DType dtype)
    : workspace_(comm, op, size_t(m * k) * size_of(dtype), 0, comm.size() * kMaxChunks),
      m_(m),
      k_(k),
      dtype_(dtype) {}

Tensor ShardGather::all() const {
  return Tensor(workspace_.shared(), dtype_, {m_, k_});
}

void ShardGather::begin(int chunks, const Tensor& x, bool keep) {
  workspace_.begin();
  const int rank = workspace_.comm().rank(), world = workspace_.comm().size();
  const Range mine = split(m_, world, rank);
  own_ = x;
  flush_ = true;
  if (keep || !x.contiguous()) {
    const ScopedSpan span(SpanKind::compute, "gather_own");
    own_ = all().rows(mine.begin, mine.count);
    copy_rows(x, static_cast<std::byte*>(own_.data()));
    flush_ = false;  // sent from the workspace, see there
  }
  const size_t line = size_t(k_) * size_of(dtype_);
  for (int step = 1; step < world; ++step) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const Range rows = chunk_rows(m_, world, rank, chunks, chunk, Taper::falling);
      const auto* source =
          static_cast<const std::byte*>(own_.data()) + size_t(rows.begin - mine.begin) * line;
      workspace_.put(ag_target(rank, world, step), size_t(rows.begin) * line, source,
                     size_t(rows.count) * line, signal(rank, chunk));
    }
  }
}

void ShardGather::await(int chunks, int owner, int chunk) {
  workspace_.await(signal(owner, chunk), owner, chunk_id(owner, chunks, chunk));
}

void ShardGather::end() {
  if (flush_ && workspace_.comm().size() > 1) workspace_.flush();
}

}  // namespace tandem
