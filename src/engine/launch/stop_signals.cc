#include "engine/launch/stop_signals.h"

#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <chrono>
#include <string_view>
#include <utility>

#include "core/system/console.h"
#include "core/system/files.h"

namespace tandem {
namespace {

constexpr double kSameWishS = 1;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string_view name_of_signal(int signal) {
  return signal == SIGINT ? "SIGINT" : signal == SIGHUP ? "SIGHUP" : "SIGTERM";
}

sigset_t save_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGUSR1);
  sigaddset(&signals, SIGUSR2);
  return signals;
}

sigset_t signals_at_start;

void begin_process(int argc, char** argv, char**) {
  sigprocmask(SIG_BLOCK, nullptr, &signals_at_start);
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "train" || command == "launch") hold_save_requests();
}

// Before the initialization of libraries; sanitizers do not work so early.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
__attribute__((constructor)) void begin_process_early(int argc, char** argv, char** environment) {
  begin_process(argc, argv, environment);
}
#else
__attribute__((section(".preinit_array"), used)) void (*before_libraries)(int, char**,
                                                                          char**) = begin_process;
#endif

}  // namespace

const sigset_t& inherited_signals() {
  return signals_at_start;
}

void hold_save_requests() {
  const sigset_t signals = save_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

void drop_save_requests() {
  const sigset_t signals = save_signals();
  const timespec none{};
  while (sigtimedwait(&signals, nullptr, &none) > 0) {
  }
}

sigset_t watched_signals() {
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    sigaddset(&watched, signal);
  }
  return watched;
}

StopSignals::StopSignals(std::string answer)
    : answer_(std::move(answer)),
      watched_(watched_signals()),
      signals_(::signalfd(-1, &watched_, SFD_CLOEXEC)),
      over_(::eventfd(0, EFD_CLOEXEC)) {
  if (signals_ < 0 || over_ < 0) throw_errno("signals", "cannot wait for them");
  pthread_sigmask(SIG_BLOCK, &watched_, &before_);
  waiter_ = std::thread([this] { await_signals(); });
}

StopSignals::~StopSignals() {
  ::eventfd_write(over_, 1);
  waiter_.join();
  ::close(signals_);
  ::close(over_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopSignals::await_signals() {
  pollfd events[] = {{signals_, POLLIN, 0}, {over_, POLLIN, 0}};
  while (true) {
    ::poll(events, 2, -1);
    if (events[1].revents != 0) return;
    signalfd_siginfo info{};
    if (::read(signals_, &info, sizeof info) != sizeof info) continue;
    const int signal = int(info.ssi_signo);
    signal == SIGUSR1 || signal == SIGUSR2 ? void(++saves_) : stop_for(signal);
  }
}

void StopSignals::stop_for(int signal) {
  if (came_.exchange(true)) {
    if (now_s() - came_at_ < kSameWishS) return;
    ::signal(signal, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &watched_, nullptr);
    ::raise(signal);
  }
  came_at_ = now_s();
  if (!answer_.empty()) complain(fmt::format("\n{}: {}", name_of_signal(signal), answer_));
}

}  // namespace tandem
