#include "comm/device/gpu_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "comm/arguments.h"
#include "comm/device/error_record.h"
#include "comm/device/signal_kernels.h"
#include "comm/device/stream_memory.h"

namespace tandem::gpu {

using Clock = std::chrono::steady_clock;

namespace {

// Host limits in deadlines. A call's device-side waits end within 2.25 deadlines (extend_deadline).
constexpr double kPatience = 3;
constexpr double kReported_s = 1;
constexpr double kLate = 0.5;
constexpr std::chrono::milliseconds kGrace{100};
/// For transports to abort, which takes as long as CUDA graphs of their calls exist.
constexpr std::chrono::seconds kAbort{1};

}  // namespace

GpuCommunicator& as_gpu(Communicator& comm) {
  if (auto* gpu = dynamic_cast<GpuCommunicator*>(&comm)) return *gpu;
  throw InvalidArgument(
      fmt::format("communicator: transport {}: expected nccl or one_gpu", comm.transport()));
}

GpuBuffer::GpuBuffer(GpuCommunicator& comm, size_t bytes, int signals, OwnedSymmetric memory,
                     std::vector<RankMemory> memories)
    : comm_(comm),
      memory_(std::move(memory)),
      number_(comm.retired_.issue()),
      memories_(std::move(memories)) {
  local_ = rank_memory(comm.rank()).memory;
  bytes_ = bytes;
  signals_ = signals;
  if (!comm.one_node()) return;
  table_.rank = comm.rank();
  table_.size = comm.size();
  for (size_t r = 0; r < memories_.size(); ++r) {
    table_.memory[r] = memories_[r].memory;
    table_.signals[r] = memories_[r].signals;
  }
}

std::byte* GpuBuffer::peer(int rank) const {
  return comm_.one_node() || rank == comm_.rank() ? rank_memory(rank).memory : nullptr;
}

GpuBuffer::~GpuBuffer() {
  comm_.retired_.add(number_, std::move(memory_));
}

GpuCommunicator::GpuCommunicator(Communicator& control, std::shared_ptr<WorldState> world)
    : Communicator(control.rank(), control.size(), control.deadline()),
      control_(control),
      world_(std::move(world)),
      aborts_(control.allocate(0, 1)),
      share_(this_share()),
      stream_(initial_stream_.get()) {
  watch_.emplace(stream_, static_cast<const StreamChecks&>(*this));
  join(std::make_shared<Family>());
}

GpuCommunicator::~GpuCommunicator() {
  leave_family();
  set_stream(initial_stream_.get());
}

void GpuCommunicator::use(const OwnedLinkPacer& link_pacer) {
  link_pacer_ = &link_pacer;
  paced_puts_.emplace(link_pacer.get());
}

void GpuCommunicator::join(std::shared_ptr<Family> family) {
  leave_family();
  family_ = std::move(family);
  const std::lock_guard lock(family_->mutex);
  family_->members.push_back(this);
}

void GpuCommunicator::leave_family() {
  if (!family_) return;
  const std::lock_guard lock(family_->mutex);
  std::erase(family_->members, this);
}

void GpuCommunicator::end() {
  end_with_ranks();
  leave_family();  // the others would call the transport that has ended
}

void GpuCommunicator::end_with_ranks() {
  if (world_) return end_alone();
  // Freeing waits for the peers, which a rank that failed must not do.
  if (failed_ || std::uncaught_exceptions() > 0) give_up();
  attached_.clear();  // may own symmetric memory
  try {
    if (!failed_) free_retired();
  } catch (const Error&) {
    give_up();
  }
  if (auto left = retired_.take_all(); !left.empty()) abandon(std::move(left));
}

// Peers may continue, but make no more calls with this rank.
void GpuCommunicator::end_alone() {
  try {
    if (!failed_) {
      synchronize();
      flush();
    }
  } catch (const Error&) {
    failed_ = true;
  }
  if (failed_) give_up();
  attached_.clear();
  if (auto left = retired_.take_all(); !left.empty()) abandon(std::move(left));
}

void GpuCommunicator::set_stream(cudaStream_t stream) {
  if (stream == stream_) return;
  if (shares_gpu() && (stream == nullptr || stream == cudaStreamLegacy)) {
    throw InvalidArgument(
        "set_stream: the default stream: expected one of this rank's own, as the ranks that share "
        "this GPU have the same default stream and wait for each other");
  }
  if (stream != initial_stream_.get()) share_->adopt_stream(stream);
  if (stream_ != initial_stream_.get()) share_->release_stream(stream_);
  stream_ = stream;
  watch_.emplace(stream_, static_cast<const StreamChecks&>(*this));
}

void GpuCommunicator::give_up() const {
  const std::lock_guard lock(family_->mutex);
  for (const GpuCommunicator* member : family_->members) {
    end_waits(*member->record_.get());
    member->failed_ = true;
    member->do_give_up();
  }
  const auto until = Clock::now() + kAbort;
  for (const GpuCommunicator* member : family_->members) member->await_give_up(until);
}

bool GpuCommunicator::has_given_up() const {
  const std::lock_guard lock(family_->mutex);
  return std::ranges::any_of(family_->members, [](const GpuCommunicator* member) {
    return member->failed_ || state_of(*member->record_.get()) != ErrorRecord::kNone;
  });
}

void GpuCommunicator::agree_on(std::string_view what, const std::function<void()>& step) {
  std::exception_ptr local;
  const std::string failure = failure_of([&] {
    try {
      step();
    } catch (...) {
      local = std::current_exception();
      throw;
    }
  });
  const Blobs exchanged = exchange(std::as_bytes(std::span(failure.data(), failure.size())), what);
  if (local) std::rethrow_exception(local);
  if (const std::string first = first_failure(exchanged); !first.empty()) throw DeviceError(first);
}

void GpuCommunicator::end_device_waits() const {
  end_waits(*record_.get());
  failed_ = true;
}

// Returns `call`'s result. If it throws Aborted, all waits on the device have been ended.
template <typename Call>
auto GpuCommunicator::giving_up_if_aborted(const Call& call) const {
  try {
    return call();
  } catch (const Aborted&) {
    const auto timeout = end_after_abort(*record_.get(), rank_, deadline_s_, kGrace, where_);
    give_up();
    if (timeout) throw Timeout(*timeout);
    if (const auto mismatch = mismatch_in(*record_.get(), rank_)) throw Mismatch(*mismatch);
    throw;
  }
}

void GpuCommunicator::look_for_abort() const {
  giving_up_if_aborted([&] { control_.wait(*aborts_, 0, 0, {}); });
}

std::shared_ptr<SymmetricBuffer> GpuCommunicator::allocate(size_t bytes, int signals) {
  check_allocation(bytes, signals);
  require_same("allocate", fmt::format("{} bytes, {} signals", bytes, signals));
  free_retired();
  return do_allocate(bytes, signals);
}

// Collective: frees what all ranks have dropped, once no GPU uses it any more.
void GpuCommunicator::free_retired() {
  const std::vector<uint64_t> local = retired_.numbers();
  const Blobs exchanged = exchange(std::as_bytes(std::span(local)), "free symmetric memory");
  if (in_all(exchanged).empty()) return;
  synchronize();
  flush();
  share_->synchronize();  // the caller's other streams
  barrier("free symmetric memory");
  retired_.take(exchanged);
}

void GpuCommunicator::put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                          size_t bytes, int signal, uint64_t epoch) {
  check_put(size_, peer, buffer, offset, bytes, signal);
  const RankMemory& to = static_cast<GpuBuffer&>(buffer).rank_memory(peer);
  if (!to.memory) {
    throw Unsupported(
        fmt::format("put: rank {} to rank {}: expected ranks of one node", rank_, peer));
  }
  if (!copies_) copies_.emplace(Common::side);
  const cudaStream_t copies = copies_->get();
  produced_.record(stream_);
  produced_.block(copies);
  const bool paced = paced_puts_ && peer != rank_;
  if (paced) paced_puts_->begin(int64_t(bytes), copies);
  if (bytes > 0) {
    check(cudaMemcpyAsync(to.memory + offset, source, bytes, cudaMemcpyDefault, copies), "put");
  }
  if (paced) paced_puts_->end(copies);
  write_value(copies, to.signals + signal, epoch);
}

void GpuCommunicator::flush() {
  synchronize(copies_ ? copies_->get() : polls_.get(), "flush");
}

uint64_t GpuCommunicator::read_signal(const SymmetricBuffer& buffer, int signal) const {
  check_signal(buffer, signal, "read_signal");
  const RankMemory& local = static_cast<const GpuBuffer&>(buffer).rank_memory(rank_);
  check(cudaMemcpyAsync(seen_.get(), local.signals + signal, sizeof(uint64_t), cudaMemcpyDefault,
                        polls_.get()),
        "read_signal");
  check(cudaStreamSynchronize(polls_.get()), "read_signal");
  return *seen_.get();
}

void GpuCommunicator::wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                           const WaitSite& site) {
  check_signal(buffer, signal, "wait");
  const auto begin = Clock::now();
  const WaitActivity waits(site.op, -1);
  for (;;) {
    look_for_abort();
    const uint64_t seen = read_signal(buffer, signal);
    if (seen >= epoch) return;
    check_device();
    if (std::chrono::duration<double>(Clock::now() - begin).count() > deadline_s_) {
      give_up();
      throw Timeout(site, rank_, epoch, seen, deadline_s_);
    }
  }
}

void GpuCommunicator::enqueue_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                                   const WaitSite& site) {
  check_signal(buffer, signal, "enqueue_wait");
  check_device();
  const RankMemory& local = static_cast<const GpuBuffer&>(buffer).rank_memory(rank_);
  launch_wait(local.signals + signal, epoch, {wait_number(site.op), site.peer, site.tile},
              device_deadline(), stream_);
}

void GpuCommunicator::abort(const std::string& reason) {
  end_device_waits();
  control_.abort(reason);
}

std::unique_ptr<Communicator> GpuCommunicator::split(int color, int key) {
  auto control = giving_up_if_aborted([&] { return control_.split(color, key); });
  auto rank_memory = do_split(*control);
  rank_memory->owned_control_ = std::move(control);
  rank_memory->parent_ = weak_from_this().lock();
  rank_memory->join(family_);
  rank_memory->set_deadline(deadline_s_);
  return rank_memory;
}

std::unique_ptr<Communicator> GpuCommunicator::split_on_host() {
  return giving_up_if_aborted([&] { return control_.split(0, rank_); });
}

std::vector<std::vector<std::byte>> GpuCommunicator::exchange(std::span<const std::byte> blob,
                                                              std::string_view what) {
  control_.set_deadline(deadline_s_);
  return giving_up_if_aborted([&] { return control_.exchange(blob, what); });
}

void GpuCommunicator::check_device() const {
  const int state = state_of(*record_.get());
  if (state == ErrorRecord::kNone || state == ErrorRecord::kWriting) return;
  give_up();
  if (const auto timeout = timeout_in(*record_.get(), rank_, deadline_s_, where_)) {
    throw Timeout(*timeout);
  }
  if (const auto mismatch = mismatch_in(*record_.get(), rank_)) throw Mismatch(*mismatch);
  look_for_abort();
  throw Aborted(rank_, "abort was called");  // called by this rank just now
}

// Recorded before the deadline, at which the waits of all ranks end, and with them whatever delayed
// one.
void GpuCommunicator::note_late(double waited_s) const {
  if (where_.empty() && waited_s > kLate * deadline_s_) where_ = where_ranks_are();
}

void GpuCommunicator::synchronize() const {
  synchronize(stream_, "synchronize");
}

void GpuCommunicator::synchronize(cudaStream_t stream, const char* what) const {
  poll(
      what, [&] { return cudaStreamQuery(stream); },
      [&](double waited_s) { check_so_far(what, waited_s); });
  note_wait_end();
  look_for_abort();
  check_device();
}

// A stream's work may wait for a peer, which is judged instead (comm/rendezvous/hang_watch.h).
void GpuCommunicator::note_wait(const char* what) const {
  if (!progress_words || waiting_ || current_activity() != RankActivity::work) return;
  waiting_.emplace(what, -1);
}

void GpuCommunicator::note_wait_end() const {
  if (progress_words) waiting_.reset();
}

// An error is reported once to those who wait without a call of this communicator.
void GpuCommunicator::check_wait(const char* what, double waited_s) const {
  failed_ ? report_end() : check_so_far(what, waited_s);
}

void GpuCommunicator::check_end() const {
  note_wait_end();
  if (failed_) return report_end();
  look_for_abort();
  check_device();
}

void GpuCommunicator::report_end() const {
  if (family_->is_unreported.exchange(false)) look_for_abort();
}

void GpuCommunicator::give_up_for_abort() const {
  family_->is_unreported = true;
  give_up();
}

// NCCL's kernels have no deadline, so the host enforces one, long enough for every device-side wait
// of the stream to report first. After such a report only NCCL's kernels hold the stream.
void GpuCommunicator::check_so_far(const char* what, double waited_s) const {
  note_wait(what);
  note_late(waited_s);
  const int state = state_of(*record_.get());
  const bool reported = state != ErrorRecord::kNone && state != ErrorRecord::kWriting;
  if (!reported) unreported_s_ = waited_s;
  if (reported && waited_s > unreported_s_ + kReported_s) check_device();
  if (waited_s > kPatience * deadline_s_) {
    check_device();
    const LateRank late = where_.empty() ? find_late_rank() : LateRank{-1, where_};
    give_up();
    throw Timeout(Timeout({what, late.rank}, rank_, 0, 0, waited_s), late.position);
  }
  look_for_abort();
}

// NCCL's kernels do not report which rank they wait for. All ranks in such a wait reach its limit
// and this exchange within a deadline of each other; a rank that does not is the late one.
GpuCommunicator::LateRank GpuCommunicator::find_late_rank() const {
  try {
    control_.set_deadline(deadline_s_);
    control_.exchange({}, "a wait that timed out");
  } catch (const Timeout& error) {
    return {error.peer, ""};
  } catch (const Mismatch& error) {
    return {-1, error.what()};  // it is in another exchange
  } catch (const Error&) {      // aborted by a rank that has given up
  }
  return {};
}

std::vector<double> GpuCommunicator::slowest(std::span<const double> local) {
  const auto all = exchange(std::as_bytes(local), "slowest");
  std::vector<double> result(local.begin(), local.end()), remote(local.size());
  for (const auto& blob : all) {
    if (blob.size() != local.size_bytes()) throw Mismatch("slowest: ranks pass different counts");
    std::memcpy(remote.data(), blob.data(), blob.size());
    for (size_t i = 0; i < local.size(); ++i) result[i] = std::max(result[i], remote[i]);
  }
  return result;
}

}  // namespace tandem::gpu
