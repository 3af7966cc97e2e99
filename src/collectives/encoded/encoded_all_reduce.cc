// All-reduce over a wire format (Flash Communication, arXiv 2412.04964). One shot, for two ranks
// and small messages: every rank sends its encoded contribution to all, and all add the same
// messages. Two shots: contributions are sent to the owner of their shard, which adds them in f32
// (its own uncompressed) and sends the encoded sum to all; it keeps the decoded form of that
// message. While chunk t is encoded and sent, chunk t - 1 is summed and chunk t - 2's results are
// decoded.
#include "collectives/call.h"
#include "collectives/encoded/encoded.h"
#include "collectives/gpu.h"
#include "collectives/rows/routes.h"
#include "core/operands.h"

namespace tandem {

using namespace collectives;

namespace {

class EncodedAllReduce {
 public:
  EncodedAllReduce(Call& call, const Wire& wire, const Tensor& data, const Tensor* residual,
                   bool is_one_shot)
      : call_(call),
        elements_(data.elements()),
        element_(size_of(data.dtype())),
        data_(data.as<std::byte>()),
        residual_(residual ? residual->as<float>() : nullptr),
        is_one_shot_(is_one_shot),
        encoded_(call, wire, data.dtype(), is_one_shot_ ? elements_ : shard(0).count),
        partials_(size_t(call.size())) {}

  /// Runs with a message that fits in the envelope.
  void run_at_once(size_t bytes) {
    std::vector<std::byte> message(bytes);
    PendingResidual residual(residual_, elements_);
    const size_t used = encoded_.encode(data_, elements_, residual.at(0), message.data());
    call_.enter_all({message.data(), used});
    call_.check();
    residual.store();
    for (int r = 0; r < call_.size(); ++r) {
      partials_[size_t(r)] = {r == call_.rank() ? message.data() : call_.payload(r), true};
    }
    encoded_.reduce(partials_, elements_, data_);
  }

  void run() {
    call_.enter_all({});
    if (residual_) call_.check();  // encoding writes to the residual
    for (int64_t t = 0; t < encoded_.steps() + 2; ++t) {
      is_one_shot_ ? send_to_all(t) : send_to_owners(t);
      if (t == 0 && !residual_) call_.check();
      if (is_one_shot_) {
        sum_all(t - 1);
        continue;
      }
      sum_local(t - 1);
      for (int step = 1; step < call_.size(); ++step) {
        const int source = call_.peer(call_.size() - step);
        const Elements chunk = encoded_.chunk(shard(source), t - 2);
        if (chunk.count) encoded_.receive(Stream::gather, source, at(chunk), chunk.count);
      }
    }
    call_.finish();
  }

 private:
  Elements shard(int rank) const { return shard_of(elements_, call_.size(), rank); }
  std::byte* at(const Elements& chunk) const { return data_ + size_t(chunk.begin) * element_; }
  float* residual_at(const Elements& chunk) const {
    return residual_ ? residual_ + chunk.begin : nullptr;
  }

  void send_to_owners(int64_t t) {
    for (int step = 1; step < call_.size(); ++step) {
      const int peer = call_.peer(step);
      const Elements chunk = encoded_.chunk(shard(peer), t);
      if (!chunk.count) continue;
      encoded_.send(Stream::reduce, peer, at(chunk), chunk.count, residual_at(chunk));
    }
  }

  void sum_local(int64_t t) {
    const Elements chunk = encoded_.chunk(shard(call_.rank()), t);
    if (!chunk.count) return;
    receive_partials(Stream::reduce, {at(chunk), false});
    std::byte* message = call_.staging_for_all(uint64_t(t));
    const size_t bytes =
        encoded_.reduce_into(partials_, chunk.count, residual_at(chunk), message, at(chunk));
    release_partials(Stream::reduce);
    for (int step = 1; step < call_.size(); ++step) {
      call_.send(Stream::gather, call_.peer(step), message, bytes);
    }
  }

  void send_to_all(int64_t t) {
    const Elements chunk = encoded_.chunk({0, elements_}, t);
    if (!chunk.count) return;
    std::byte* message = call_.staging_for_all(uint64_t(t));
    const size_t bytes = encoded_.encode(at(chunk), chunk.count, residual_at(chunk), message);
    for (int step = 1; step < call_.size(); ++step) {
      call_.send(Stream::gather, call_.peer(step), message, bytes);
    }
    local_[t % 2] = message;
  }

  void sum_all(int64_t t) {
    const Elements chunk = encoded_.chunk({0, elements_}, t);
    if (!chunk.count) return;
    receive_partials(Stream::gather, {local_[t % 2], true});
    encoded_.reduce(partials_, chunk.count, at(chunk));
    release_partials(Stream::gather);
  }

  void receive_partials(Stream stream, const Encoded::Partial& local) {
    for (int r = 0; r < call_.size(); ++r) {
      partials_[size_t(r)] =
          r == call_.rank() ? local : Encoded::Partial{call_.receive(stream, r), true};
    }
  }
  void release_partials(Stream stream) {
    for (int step = 1; step < call_.size(); ++step) call_.release(stream, call_.peer(step));
  }

  Call& call_;
  const int64_t elements_;
  const size_t element_;
  std::byte* const data_;
  float* const residual_;
  const bool is_one_shot_;
  Encoded encoded_;
  std::vector<Encoded::Partial> partials_;
  const std::byte* local_[2] = {};  // this rank's messages of the last two steps
};

}  // namespace

void collectives::check_all_reduce(const Communicator& comm, const Tensor& data, const Wire& wire,
                                   const Tensor* residual) {
  require_writable("all_reduce", {"data", &data});
  require_encoded("all_reduce", comm, wire, data, residual);
  require_contiguous("all_reduce", "data", data);
}

void collectives::run_all_reduce(Communicator& comm, const Tensor& data, const Wire& wire,
                                 const Tensor* residual, Route route) {
  if (route == Route::uncompressed)
    return uncompressed_all_reduce(comm, data, ReduceOp::sum, {wire, route});
  Args args(Op::all_reduce, data);
  args.wire = wire;
  args.route = route;
  Call call(comm, args, {.written = {"data", &data}, .residual = {"residual", residual}});
  const size_t bytes = wire.bytes(data.elements(), data.dtype());
  const bool at_once = bytes <= call.small();
  const bool is_one_shot = at_once || call.size() == 2 || route == Route::one_shot;
  EncodedAllReduce all(call, wire, data, residual, is_one_shot);
  at_once ? all.run_at_once(bytes) : all.run();
}

void all_reduce(Communicator& comm, const Tensor& data, const Wire& wire, const Tensor* residual) {
  if (wire.is_none()) return all_reduce(comm, data);
  if (gpu::is_gpu(comm)) {
    require_writable("all_reduce", {"data", &data});
    return gpu::all_reduce(comm, data, wire, residual);
  }
  check_all_reduce(comm, data, wire, residual);
  if (comm.size() > 1) run_all_reduce(comm, data, wire, residual, Route::given);
}

}  // namespace tandem
