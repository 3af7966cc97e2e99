#include "collectives/call.h"
#include "collectives/encoded/encoded.h"
#include "collectives/gpu.h"
#include "collectives/rows/routes.h"
#include "collectives/rows/rows.h"

namespace tandem {

using namespace collectives;

namespace {

class EncodedReduceScatter {
 public:
  EncodedReduceScatter(Call& call, const Wire& wire, const Tensor& data, const Tensor& shard,
                       const Tensor* residual)
      : call_(call),
        rows_(data.dim(0)),
        row_(rows_ ? data.elements() / rows_ : 0),
        element_(size_of(data.dtype())),
        data_(data.as<const std::byte>()),
        out_(shard.as<std::byte>()),
        residual_(residual ? residual->as<float>() : nullptr),
        encoded_(call, wire, data.dtype(), elements_of(0).count),
        partials_(size_t(call.size())) {}

  /// Runs with messages that fit in the envelopes.
  void run_at_once(size_t bytes) {
    std::vector<std::byte> message(bytes);
    PendingResidual residual(residual_, rows_ * row_);
    for (int step = 1; step < call_.size(); ++step) {
      const Elements remote = elements_of(call_.peer(step));
      const size_t used =
          encoded_.encode(at(remote), remote.count, residual.at(remote.begin), message.data());
      call_.enter(call_.peer(step), {message.data(), used});
    }
    call_.check();
    residual.store();
    const Elements local = elements_of(call_.rank());
    for (int r = 0; r < call_.size(); ++r) {
      partials_[size_t(r)] = {r == call_.rank() ? at(local) : call_.payload(r), r != call_.rank()};
    }
    encoded_.reduce(partials_, local.count, out_);
  }

  void run() {
    call_.enter_all({});
    if (residual_) call_.check();  // encoding writes to the residual
    for (int64_t t = 0; t < encoded_.steps() + 1; ++t) {
      for (int step = 1; step < call_.size(); ++step) {
        const int peer = call_.peer(step);
        const Elements chunk = encoded_.chunk(elements_of(peer), t);
        if (!chunk.count) continue;
        encoded_.send(Stream::reduce, peer, at(chunk), chunk.count, residual_at(chunk));
      }
      if (t == 0 && !residual_) call_.check();
      sum_local(t - 1);
    }
    call_.finish();
  }

 private:
  Elements elements_of(int rank) const {
    const Shard rows = shard_of(rows_, call_.size(), rank);
    return {rows.begin * row_, rows.count * row_};
  }
  const std::byte* at(const Elements& chunk) const {
    return data_ + size_t(chunk.begin) * element_;
  }
  float* residual_at(const Elements& chunk) const {
    return residual_ ? residual_ + chunk.begin : nullptr;
  }

  void sum_local(int64_t t) {
    const Elements local = elements_of(call_.rank()), chunk = encoded_.chunk(local, t);
    if (!chunk.count) return;
    for (int r = 0; r < call_.size(); ++r) {
      const bool is_local = r == call_.rank();
      partials_[size_t(r)] = {is_local ? at(chunk) : call_.receive(Stream::reduce, r), !is_local};
    }
    encoded_.reduce(partials_, chunk.count, out_ + size_t(chunk.begin - local.begin) * element_);
    for (int step = 1; step < call_.size(); ++step) call_.release(Stream::reduce, call_.peer(step));
  }

  Call& call_;
  const int64_t rows_, row_;
  const size_t element_;
  const std::byte* const data_;
  std::byte* const out_;
  float* const residual_;
  Encoded encoded_;
  std::vector<Encoded::Partial> partials_;
};

}  // namespace

void collectives::check_reduce_scatter(const Communicator& comm, const Tensor& data,
                                       const Tensor& shard, const Wire& wire,
                                       const Tensor* residual) {
  require_writable("reduce_scatter", {"shard", &shard});
  require_encoded("reduce_scatter", comm, wire, data, residual);
  require_contiguous("reduce_scatter", "data", data);
  require_contiguous("reduce_scatter", "shard", shard);
  require_shard("reduce_scatter", comm, shard, data);
  require_shard_position("reduce_scatter", comm, shard, {"data", &data});
}

void collectives::run_reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard,
                                     const Wire& wire, const Tensor* residual, Route route) {
  if (route == Route::uncompressed) {
    return uncompressed_reduce_scatter(comm, data, shard, ReduceOp::sum, {wire, route});
  }
  Args args(Op::reduce_scatter, data);
  args.wire = wire;
  args.route = route;
  Call call(
      comm, args,
      {.written = {"shard", &shard}, .read = {"data", &data}, .residual = {"residual", residual}});
  EncodedReduceScatter all(call, wire, data, shard, residual);
  const int64_t rows = data.dim(0), row = rows ? data.elements() / rows : 0;
  const size_t bytes = wire.bytes(shard_of(rows, comm.size(), 0).count * row, data.dtype());
  bytes <= call.small() ? all.run_at_once(bytes) : all.run();
}

void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual) {
  if (wire.is_none() || comm.size() == 1) return reduce_scatter(comm, data, shard);
  if (gpu::is_gpu(comm)) {
    require_writable("reduce_scatter", {"shard", &shard});
    return gpu::reduce_scatter(comm, data, shard, wire, residual);
  }
  check_reduce_scatter(comm, data, shard, wire, residual);
  run_reduce_scatter(comm, data, shard, wire, residual, Route::given);
}

}  // namespace tandem
