#include "core/system/process/thread_stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

namespace tandem {
namespace {

constexpr int kFrames = 32;
constexpr int kSignal = SIGURG;  // ignored by default, so a late one is harmless
constexpr std::chrono::milliseconds kPatience{200};

// One request at a time.
std::mutex asking;
std::atomic<pid_t> asked{0};
std::atomic<int> found{0};
void* frames[kFrames];
bool stuck = false;  // a thread may still write to these

void answer(int) {
  const int error = errno;
  pid_t self = this_thread_id();
  if (asked.compare_exchange_strong(self, 0)) found = backtrace(frames, kFrames);
  errno = error;
}

/// False if the program has a handler of its own.
bool install() {
  struct sigaction before {};
  if (sigaction(kSignal, nullptr, &before) != 0) return false;
  if (before.sa_handler == answer) return true;
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return false;
  void* once[1];
  backtrace(once, 1);  // loads its libraries, which a handler must not do
  struct sigaction action {};
  action.sa_handler = answer;
  action.sa_flags = SA_RESTART;
  return sigaction(kSignal, &action, nullptr) == 0;
}

std::string name_of_frame(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || !info.dli_fname) return fmt::format("{}", address);
  if (info.dli_sname) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> demangled(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), &std::free);
    const std::string_view name = status == 0 ? demangled.get() : info.dli_sname;
    return std::string(name.substr(0, name.find('(')));
  }
  const std::string_view file = info.dli_fname;
  const auto* const base = static_cast<const std::byte*>(info.dli_fbase);
  return fmt::format("{}+{:#x}", file.substr(file.rfind('/') + 1),
                     static_cast<const std::byte*>(address) - base);
}

}  // namespace

pid_t this_thread_id() {
  return pid_t(syscall(SYS_gettid));
}

std::string stack_of_thread(pid_t id) {
  const std::lock_guard lock(asking);
  int first = 1;  // after the trampoline of the signal
  if (id == this_thread_id()) {
    found = backtrace(frames, kFrames);
  } else {
    if (stuck || !install()) return "";
    found = 0;
    asked = id;
    if (syscall(SYS_tgkill, getpid(), id, kSignal) != 0) return "";
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (found == 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    pid_t silent = id;
    if (asked.compare_exchange_strong(silent, 0)) return "";
    // The thread is answering. It never finishes if it was interrupted holding a lock that this
    // needs.
    const auto answered = std::chrono::steady_clock::now() + kPatience;
    while (found == 0 && std::chrono::steady_clock::now() < answered) std::this_thread::yield();
    if (found == 0) {
      stuck = true;
      return "";
    }
    first = 2;
  }
  std::string text;
  for (int i = first; i < found; ++i) {
    text += (text.empty() ? "" : " < ") + name_of_frame(frames[i]);
  }
  return text;
}

}  // namespace tandem
