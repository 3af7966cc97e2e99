#include "overlap/gemm_rs/cuda/chunk_pushes.h"

#include "comm/device/gpu_communicator.h"
#include "comm/device/stream_memory.h"
#include "schedule/ring.h"

namespace tandem::gpu {

void ChunkPushes::run(int chunks, cudaStream_t stream, const std::function<void()>& kernel) {
  const bool replays = replays_graphs() && !is_captured(stream);
  if (replays && !graphs_.contains(chunks)) {
    graphs_.emplace(chunks, Graph(side_.get(), [&] { enqueue(chunks); }));
  }
  // Pushes must follow earlier work on `stream`: a graph captured by the caller has its own pushes,
  // which use the same flags.
  begun_.record(stream);
  // Launches the kernel first: a stream that waits for it must not block it.
  kernel();
  begun_.block(side_.get());
  if (replays) {
    graphs_.at(chunks).launch(side_.get());
  } else {
    enqueue(chunks);
  }
  pushed_.record(side_.get());
  pushed_.block(stream);
}

// Alternates between two streams: on one, 8 us pass between a copy's end and the next one's start.
void ChunkPushes::enqueue(int chunks) {
  const PeerTable& staging = route_.staging;
  const size_t bytes = route_.slot_bytes / size_t(chunks);
  forked_.record(side_.get());
  forked_.block(other_side_.get());
  for (int step = 0; step + 1 < staging.size; ++step) {
    const int owner = schedule::rs_owner(staging.rank, staging.size, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const CommonStream& stream = (step * chunks + chunk) % 2 == 0 ? side_ : other_side_;
      const int number = step * route_.max_chunks + chunk;
      const size_t at = size_t(chunk) * bytes;
      wait_value_and_reset(stream.get(), route_.ready + number, 1);
      // The owner identifies this rank by the ring step.
      check(cudaMemcpyAsync(staging.memory[owner] + size_t(step) * route_.slot_bytes + at,
                            route_.send_buffer + size_t(owner) * route_.slot_bytes + at, bytes,
                            cudaMemcpyDefault, stream.get()),
            "push a chunk");
      check(cudaMemcpyAsync(staging.signals[owner] + route_.first_signal + number,
                            route_.sending + number, sizeof(uint64_t), cudaMemcpyDefault,
                            stream.get()),
            "signal a chunk");
    }
  }
  joined_.record(other_side_.get());
  joined_.block(side_.get());
}

}  // namespace tandem::gpu
