#include "engine/launch/live_process.h"

#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "core/system/console.h"
#include "engine/serve/http/live_server.h"

namespace tandem {

LiveProcess::LiveProcess(const std::string& address, const std::string& dir) : parent_(::getpid()) {
  if (address.empty()) return;
  parse_listen_address("--live", address);
  std::vector<std::string> words{
      "tandem", "report", "--live=" + address, "--live-parent=" + std::to_string(parent_),
      "--",     dir};
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const int error =
      ::posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, pointers.data(), environ);
  if (error == 0) return;
  pid_ = -1;
  complain(fmt::format("tandem: warning: no live page: {}", std::strerror(error)));
}

LiveProcess::~LiveProcess() {
  if (pid_ < 0 || ::getpid() != parent_) return;
  ::kill(pid_, SIGTERM);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace tandem
