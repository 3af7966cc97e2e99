#include "overlap/gemm_rs/cuda/ring.h"

#include "comm/nccl/signal_kernels.h"

namespace tandem::gpu {

PartialRing::PartialRing(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape,
                         int pieces)
    : comm_(&comm), shape_(shape) {
  const int size = comm.size();
  for (int step = 1; step <= size; ++step) {
    const Shard shard = shard_of(shape.m, size, (comm.rank() + size - step) % size);
    for (int i = 0; i < pieces; ++i) {
      const Shard part = shard_of(shard.count, pieces, i);
      GemmShape product = shape.product(part.count, shape.bias && comm.rank() == 0);
      product.accumulate = step > 1;
      pieces_.push_back(
          {step, i, {shard.begin + part.begin, part.count}, part.begin, LtGemm(lt, product)});
    }
  }
  computed_.resize(pieces_.size());
}

void PartialRing::run(const Buffers& buffers, const Tensor& x, const Tensor& weight,
                      const Tensor& out, const void* bias) {
  const cudaStream_t stream = comm_->stream();
  const PeerTable& table = buffers.staging.table();
  const int size = comm_->size(), left = (comm_->rank() + size - 1) % size;
  begun_.record(stream);
  begun_.block(sending_[0].get());
  launch_enter(table, buffers.entered, buffers.epochs, comm_->watch(), OpId::gemm_rs,
               sending_[0].get());
  entered_.record(sending_[0].get());
  entered_.block(sending_[1].get());
  auto* own = static_cast<std::byte*>(out.data());
  for (size_t p = 0; p < pieces_.size(); ++p) {
    const Piece& piece = pieces_[p];
    const std::byte* before = nullptr;
    if (piece.step > 1) {
      // On the stream of the products: beside them it is no faster.
      launch_wait(table, buffers.signals + signal_of(piece) - left, left, buffers.epochs + 1,
                  piece.step == 2 && piece.index == 0, comm_->watch(), OpId::gemm_rs, stream);
      before = buffers.staging.local() + buffers.slot_bytes * size_t(piece.step - 2) +
               bytes_of(piece.in_shard);
    }
    std::byte* sum = piece.step < size ? buffers.partial.data() + bytes_of(piece.rows.begin)
                                       : own + bytes_of(piece.in_shard);
    if (shape_.k == 0 && before) {  // K may differ by rank: nothing to add here
      check(cudaMemcpyAsync(sum, before, bytes_of(piece.rows.count), cudaMemcpyDefault, stream),
            "pass a sum on");
    } else {
      piece.product.run(x.rows(piece.rows.begin, piece.rows.count).data(), weight.data(), sum, bias,
                        stream, {}, before);
    }
    if (piece.step == size) continue;
    computed_[p].record(stream);
    computed_[p].block(sending_[p % 2].get());
    send(buffers, piece, sum, p);
  }
  for (int s = 0; s < 2; ++s) {
    sent_[s].record(sending_[s].get());
    sent_[s].block(stream);
  }
}

// To the right, where it is added at the next step.
void PartialRing::send(const Buffers& buffers, const Piece& piece, const std::byte* sum,
                       size_t at) {
  const PeerTable& table = buffers.staging.table();
  const int right = (comm_->rank() + 1) % comm_->size();
  const cudaStream_t stream = sending_[at % 2].get();
  check(cudaMemcpyAsync(table.memory[right] + buffers.slot_bytes * size_t(piece.step - 1) +
                            bytes_of(piece.in_shard),
                        sum, bytes_of(piece.rows.count), cudaMemcpyDefault, stream),
        "send a sum");
  check(cudaMemcpyAsync(table.signals[right] + buffers.signals + signal_of(piece) + kMostPieces,
                        buffers.epochs, sizeof(uint64_t), cudaMemcpyDefault, stream),
        "signal a sum");
}

}  // namespace tandem::gpu
