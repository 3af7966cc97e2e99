// Collectives. The baseline is the transport library's own collective if it has one (MPI);
// otherwise the reference, the simplest correct form: full contributions are sent directly to the
// ranks that need them, in one transfer each, without pipelining.
#include <algorithm>
#include <cstring>
#include <functional>

#include "bench/bench_case.h"
#include "bench/bench_collective.h"
#include "collectives/partial_sums.h"
#include "collectives/rows/routes.h"
#include "collectives/symmetric_workspace.h"
#include "comm/workspace.h"
#include "comm/world/native.h"
#include "schedule/ring.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

using namespace schedule;

using Kind = NativeOp;

/// Collective on [m, n] per rank.
class CollectiveCase : public BenchCase {
 public:
  CollectiveCase(Communicator& comm, const BenchRequest& r, Kind kind)
      : comm_(comm),
        kind_(kind),
        wire_(r.wire),
        local_(shard_of(r.m, comm.size(), comm.rank())),
        values_(data_of(r)),
        data_(r.dtype, r.m, r.n, 1 + uint64_t(comm.rank()), values_),
        out_(r.dtype, r.m + comm.size(), r.n, 0),
        expected_(r.dtype, r.m + comm.size(), r.n, 0),
        counts_(size_t(comm.size())),
        from_(size_t(comm.size())),
        sources_(size_t(comm.size())),
        workspace_(comm, "bench", data_.tensor.bytes() * size_t(comm.size()), 0, comm.size()) {
    for (int peer = 0; peer < comm.size(); ++peer) {
      counts_[size_t(peer)] = shard_of(r.m, comm.size(), peer).count;
      from_[size_t(peer)] = local_.count;
    }
    if (kind_ == Kind::broadcast && comm.rank() == 0) {
      std::memcpy(out_.tensor.data(), data_.tensor.data(), data_.tensor.bytes());
    }
    if (r.library) prepare_native();
  }
  std::string baseline() const override {
    return has_native() ? native_name(comm_, native_) : "direct puts of whole contributions";
  }
  bool has_native() const override {
    return native_memory_ && !native_name(comm_, native_).empty();
  }
  double native() override { return run_native(comm_, native_); }
  Tensor native_result() const override { return cut(native_memory_->out.tensor); }
  bool has_gemm() const override { return false; }
  /// With a codec, the uncompressed form is serial.
  std::vector<BoundCandidate> forms() override {
    if (wire_.is_none()) return {{"tandem", Strategy::overlapped, [this] { run({}); }}};
    std::vector<BoundCandidate> all{
        {"tandem", Strategy::overlapped, [this] { counted([&] { run(wire_); }); }, true},
        {"uncompressed", Strategy::serial, [this] { run({}); }}};
    if (kind_ == Kind::all_reduce && !is_one_shot()) {
      all.push_back(
          {"one shot", Strategy::overlapped, [this] { counted([&] { run_one_shot(); }); }, true});
    }
    return all;
  }
  void counted(const std::function<void()>& body) {
    const uint64_t before = comm_.workspace().bytes_sent;
    body();
    counted_bytes_ = int64_t(comm_.workspace().bytes_sent - before);
  }
  void run_one_shot() {
    std::memcpy(out_.tensor.data(), data_.tensor.data(), data_.tensor.bytes());
    collectives::run_all_reduce(comm_, result(), wire_, nullptr, collectives::Route::one_shot);
  }
  int64_t counted_bytes() const override { return counted_bytes_; }
  std::unique_ptr<CodecWork> codec_work() override {
    if (wire_.is_none() || comm_.size() == 1) return nullptr;
    return std::make_unique<CodecWork>(wire_, codec_sizes(), data_.tensor, out_.tensor);
  }
  bool is_same_on_all_ranks() const override {
    return kind_ == Kind::all_reduce || kind_ == Kind::all_gather;
  }
  double codec_error() override {
    const double each = wire_.error_bound();  // for values up to 1
    const double largest = largest_magnitude(expected());
    const double error = kind_ == Kind::all_reduce       ? comm_.size() * each * (2 + each)
                         : kind_ == Kind::reduce_scatter ? comm_.size() * each
                                                         : each;
    return largest > 0 ? error / largest : 0;
  }

  void run(const Wire& wire) {
    switch (kind_) {
      case Kind::all_reduce:
        std::memcpy(out_.tensor.data(), data_.tensor.data(), data_.tensor.bytes());
        return all_reduce(comm_, result(), wire);
      case Kind::all_gather:
        return all_gather(comm_, data_.tensor.rows(local_.begin, local_.count), result(), wire);
      case Kind::reduce_scatter:
        return reduce_scatter(comm_, data_.tensor, result(), wire);
      case Kind::all_to_all:
        return all_to_all(comm_, data_.tensor, counts_, result(), from_, wire);
      case Kind::broadcast:
        return broadcast(comm_, result(), 0);
    }
  }

  void reference() override {
    const int rank = comm_.rank(), world = comm_.size();
    const size_t whole = data_.tensor.bytes();
    workspace_.begin();
    for (int step = 0; step + 1 < world; ++step) {
      const int peer = rs_owner(rank, world, step);
      const Shard remote = shard_of(data_.tensor.dim(0), world, peer);
      const Tensor rows = sent_to(remote);
      workspace_.put(peer, size_t(rank) * whole, rows.data(), rows.bytes(), rank);
    }
    for (int source = 0; source < world; ++source) {
      if (source != rank) workspace_.await(source, source, 0);
      sources_[size_t(source)] = workspace_.shared() + size_t(source) * whole;
    }
    finish_reference();
    workspace_.flush();
  }

  Tensor result() const override { return cut(out_.tensor); }
  Tensor expected() const override { return cut(expected_.tensor); }
  int64_t wire_bytes() const override {
    const int64_t whole = int64_t(data_.tensor.bytes()), world = comm_.size();
    const int64_t local =
        local_.count * data_.tensor.dim(1) * int64_t(size_of(data_.tensor.dtype()));
    switch (kind_) {
      case Kind::all_reduce:
        return 2 * (whole - whole / world);
      case Kind::all_gather:
        return local * (world - 1);
      case Kind::reduce_scatter:
      case Kind::all_to_all:
        return whole - local;
      case Kind::broadcast:
        return world > 1 ? whole : 0;
    }
    return 0;
  }

 private:
  /// Encoded and decoded parts of each collective, as in tandem/collectives.h.
  CodecSizes codec_sizes() const {
    const int64_t whole = data_.tensor.elements(), columns = data_.tensor.dim(1);
    const auto shard = [&](int r) { return shard_of(whole, comm_.size(), r).count; };
    CodecSizes sizes;
    if (kind_ == Kind::all_reduce && is_one_shot()) {
      sizes.encoded = {whole};
      sizes.decoded.assign(size_t(comm_.size()), whole);
      return sizes;
    }
    for (int r = 0; r < comm_.size(); ++r) {
      const bool local = r == comm_.rank();
      switch (kind_) {
        case Kind::all_reduce:  // contributions; the local sum, encoded and decoded; all results
          sizes.encoded.push_back(shard(r));
          sizes.decoded.push_back(shard(r));
          if (!local) sizes.decoded.push_back(shard(comm_.rank()));
          break;
        case Kind::all_gather:
          if (local) sizes.encoded.push_back(local_.count * columns);
          sizes.decoded.push_back(counts_[size_t(r)] * columns);
          break;
        case Kind::reduce_scatter:
        case Kind::all_to_all:
          if (local) break;
          sizes.encoded.push_back(counts_[size_t(r)] * columns);
          sizes.decoded.push_back(local_.count * columns);
          break;
        case Kind::broadcast:
          break;
      }
    }
    return sizes;
  }
  bool is_one_shot() const {
    const size_t small = comm_.workspace().layout.small();
    return comm_.size() <= 2 || wire_.bytes(data_.tensor.elements(), data_.tensor.dtype()) <= small;
  }

  /// Rows that hold this collective's result on this rank. With all-to-all a rank may receive up to
  /// world - 1 rows more than m.
  Tensor cut(const Tensor& all) const {
    const int64_t world = comm_.size();
    switch (kind_) {
      case Kind::all_reduce:
      case Kind::all_gather:
      case Kind::broadcast:
        return all.rows(0, data_.tensor.dim(0));
      case Kind::reduce_scatter:
        return all.rows(0, local_.count);
      case Kind::all_to_all:
        return Tensor(all.data(), all.dtype(), {local_.count * world, all.dim(1)});
    }
    return all;
  }

  /// Rows that the reference sends to the rank that holds rows `remote`.
  Tensor sent_to(const Shard& remote) const {
    switch (kind_) {
      case Kind::all_reduce:
        return data_.tensor;
      case Kind::all_gather:
        return data_.tensor.rows(local_.begin, local_.count);
      case Kind::reduce_scatter:
      case Kind::all_to_all:
        return data_.tensor.rows(remote.begin, remote.count);
      case Kind::broadcast:
        return comm_.rank() == 0 ? data_.tensor : data_.tensor.rows(0, 0);
    }
    return data_.tensor;
  }

  struct NativeMemory {
    BenchMatrix data, out;
  };

  /// Allocates copies of the operands, owned by the native call.
  void prepare_native() {
    const int64_t rows = data_.tensor.dim(0), columns = data_.tensor.dim(1);
    const DType dtype = data_.tensor.dtype();
    native_.op = kind_;
    native_.dtype = dtype;
    if (comm_.transport() != "mpi") return;
    native_memory_.reset(
        new NativeMemory{{dtype, rows, columns, 1 + uint64_t(comm_.rank()), values_},
                         {dtype, rows + comm_.size(), columns, 0}});
    native_.memory = native_memory_;
    const auto elements = [&](const std::vector<int64_t>& row_counts) {
      std::vector<int64_t> counts;
      for (const int64_t count : row_counts) counts.push_back(count * columns);
      return counts;
    };
    const Tensor& data = native_memory_->data.tensor;
    native_.send = data.data();
    native_.receive = native_memory_->out.tensor.data();
    native_.send_counts = native_.receive_counts = elements(counts_);
    if (kind_ == Kind::all_gather) native_.send = data.rows(local_.begin, local_.count).data();
    if (kind_ == Kind::all_to_all) native_.receive_counts = elements(from_);
    if (kind_ == Kind::broadcast && comm_.rank() == 0) {
      std::memcpy(native_.receive, native_.send, data.bytes());
    }
  }

  void finish_reference() {
    const int rank = comm_.rank(), world = comm_.size();
    const DType dtype = data_.tensor.dtype();
    if (kind_ == Kind::all_reduce || kind_ == Kind::reduce_scatter) {
      const bool all = kind_ == Kind::all_reduce;
      const Tensor local = all ? data_.tensor : data_.tensor.rows(local_.begin, local_.count);
      sources_[size_t(rank)] = static_cast<const std::byte*>(local.data());
      return reduce_partials(sources_, dtype, nullptr, expected());
    }
    if (kind_ == Kind::broadcast) {
      return copy_rows(rank == 0 ? static_cast<const std::byte*>(data_.tensor.data()) : sources_[0],
                       expected());
    }
    int64_t row = 0;
    for (int source = 0; source < world; ++source) {
      const int64_t count =
          kind_ == Kind::all_gather ? counts_[size_t(source)] : from_[size_t(source)];
      const Tensor to = expected().rows(row, count);
      if (source == rank) {
        copy_rows(
            static_cast<const std::byte*>(data_.tensor.rows(local_.begin, local_.count).data()),
            to);
      } else {
        copy_rows(sources_[size_t(source)], to);
      }
      row += count;
    }
  }

  Communicator& comm_;
  Kind kind_;
  Wire wire_;
  Shard local_;
  BenchData values_;
  BenchMatrix data_, out_, expected_;
  std::vector<int64_t> counts_, from_;
  std::vector<const std::byte*> sources_;
  OverlapWorkspace workspace_;
  int64_t counted_bytes_ = 0;
  NativeCall native_;
  std::shared_ptr<NativeMemory> native_memory_;  // null: the transport has no library collectives
};

}  // namespace

std::unique_ptr<BenchCase> make_collective_case(Communicator& comm, const BenchRequest& request) {
  const BenchCollective* found = find_collective(request.op);
  return found ? std::make_unique<CollectiveCase>(comm, request, found->op) : nullptr;
}

}  // namespace tandem
