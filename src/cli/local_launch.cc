#include "cli/local_launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "cli/output.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "comm/rendezvous/store_server.h"
#include "core/file_limit.h"
#include "core/printable.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using LaunchClock = std::chrono::steady_clock;
using control::Connection;

/// After a rank has failed: until the others are asked to end, and until they are killed.
constexpr auto kAskAfter = std::chrono::seconds(5), kKillAfter = std::chrono::seconds(15);
constexpr auto kDrain = std::chrono::seconds(2);  ///< for output after the last rank's end
constexpr size_t kMaxLine = size_t{64} << 10;     ///< longer ones are printed in parts
constexpr int kPort = 29500;                      ///< part of a name only: no port is open

struct RankProcess {
  pid_t pid = -1;
  bool running = false;
  Connection output[2];  ///< its standard output and standard error
  std::string line[2];   ///< bytes of an unfinished line
};

class LocalLaunch {
 public:
  LocalLaunch(int ranks, const std::vector<std::string>& command)
      : command_(command), ranks_(size_t(ranks)) {
    launch_.size = ranks;
    launch_.host = "127.0.0.1";
    launch_.port = kPort;
    launch_.one_host = true;
    run_id_ = std::string(kLauncherRunId) + control::hex_of(control::random_digest());
    launch_.world = store_world("torchrun " + run_id_);
    sigemptyset(&watched_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD})
      sigaddset(&watched_, signal);
    sigprocmask(SIG_BLOCK, &watched_, &before_);
    signals_ = Connection(signalfd(-1, &watched_, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~LocalLaunch() {
    send_signal(SIGKILL);
    for (const RankProcess& rank : ranks_) {
      if (rank.running) waitpid(rank.pid, nullptr, 0);
    }
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  LocalLaunch(const LocalLaunch&) = delete;
  LocalLaunch& operator=(const LocalLaunch&) = delete;

  int run() {
    Connection listener;
    if (ranks_.size() > 1) listener = control::listen_on(control::endpoint_of(launch_));
    for (size_t rank = 0; rank < ranks_.size(); ++rank) start(int(rank));
    std::optional<control::StoreServer> store;  // a thread: after the last fork
    if (listener.open()) {
      store.emplace(std::move(listener), control::credentials_of({}, launch_.world),
                    int(ranks_.size()));
    }
    while (std::ranges::any_of(ranks_, &RankProcess::running)) serve();
    // Processes that a rank has left may keep its output open.
    const auto end = LaunchClock::now() + kDrain;
    while (LaunchClock::now() < end && std::ranges::any_of(ranks_, [](const RankProcess& rank) {
             return rank.output[0].open() || rank.output[1].open();
           })) {
      serve();
    }
    return status_;
  }

 private:
  void start(int index) {
    RankProcess& rank = ranks_[size_t(index)];
    int pipes[3][2];  // output, errors, and the reason why the command cannot be run
    for (auto& pipe : pipes) {
      if (pipe2(pipe, O_CLOEXEC) != 0) throw IoError(fmt::format("pipe: {}", strerror(errno)));
    }
    const pid_t parent = getpid();
    rank.pid = fork();
    if (rank.pid == 0) become(index, pipes[0][1], pipes[1][1], pipes[2][1], parent);
    for (auto& pipe : pipes) close(pipe[1]);
    const Connection failure(pipes[2][0]);
    for (int i = 0; i < 2; ++i) {
      rank.output[i] = Connection(pipes[i][0]);
      fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
    }
    if (rank.pid < 0) throw Unsupported(fmt::format("rank {}: fork: {}", index, strerror(errno)));
    setpgid(rank.pid, rank.pid);
    rank.running = true;
    int error = 0;
    if (read(failure.fd(), &error, sizeof error) != ssize_t(sizeof error)) return;
    throw InvalidArgument(fmt::format("launch: {}: {}: expected a command",
                                      printable(command_.front()), strerror(error)));
  }

  /// In the new process: never returns.
  [[noreturn]] void become(int index, int output, int errors, int failure, pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    setpgid(0, 0);  // signals reach what the command starts, too
    sigprocmask(SIG_SETMASK, &before_, nullptr);
    dup2(output, STDOUT_FILENO);
    dup2(errors, STDERR_FILENO);
    const std::string rank = std::to_string(index), size = std::to_string(ranks_.size());
    for (const auto& [name, value] : {std::pair<const char*, std::string>{"RANK", rank},
                                      {"LOCAL_RANK", rank},
                                      {"WORLD_SIZE", size},
                                      {"LOCAL_WORLD_SIZE", size},
                                      {"MASTER_ADDR", launch_.host},
                                      {"MASTER_PORT", std::to_string(kPort)},
                                      {"TORCHELASTIC_RUN_ID", run_id_}}) {
      setenv(name, value.c_str(), 1);
    }
    // The launcher's store has a secret of its own.
    for (const char* name :
         {"TORCHELASTIC_USE_AGENT_STORE", "TANDEM_SECRET", "TANDEM_SECRET_FILE"}) {
      unsetenv(name);
    }
    std::vector<char*> words;
    for (const std::string& word : command_) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    execvp(words.front(), words.data());
    const int error = errno;
    [[maybe_unused]] const auto written = write(failure, &error, sizeof error);
    _exit(127);
  }

  void serve() {
    std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}};
    for (const RankProcess& rank : ranks_) {
      for (const Connection& output : rank.output) waiting.push_back({output.fd(), POLLIN, 0});
    }
    const bool waits = !failed_ && std::ranges::any_of(ranks_, &RankProcess::running);
    poll(waiting.data(), waiting.size(), waits ? -1 : 200);
    for (size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) pass_on((i - 1) / 2, int((i - 1) % 2));
    }
    signalfd_siginfo signal{};
    while (read(signals_.fd(), &signal, sizeof signal) == ssize_t(sizeof signal)) {
      if (int(signal.ssi_signo) != SIGCHLD) send_signal(int(signal.ssi_signo));
    }
    reap();
    if (!failed_) return;
    const auto since = LaunchClock::now() - *failed_;
    if (since > kAskAfter && !std::exchange(asked_, true)) send_signal(SIGTERM);
    if (since > kKillAfter) send_signal(SIGKILL);
  }

  void send_signal(int signal) const {
    for (const RankProcess& rank : ranks_) {
      if (rank.running) kill(-rank.pid, signal);
    }
  }

  void pass_on(size_t index, int stream) {
    RankProcess& rank = ranks_[index];
    char bytes[16384];
    const ssize_t got = read(rank.output[stream].fd(), bytes, sizeof bytes);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    std::string& line = rank.line[stream];
    if (got <= 0) {
      rank.output[stream].close();
      if (!line.empty()) print(index, stream, line + "\n");
      line.clear();
      return;
    }
    line.append(bytes, size_t(got));
    for (size_t end; (end = line.find_first_of("\n\r")) != line.npos; line.erase(0, end + 1)) {
      print(index, stream, line.substr(0, end + 1));
    }
    if (line.size() < kMaxLine) return;
    print(index, stream, line + "\n");
    line.clear();
  }

  void print(size_t index, int stream, const std::string& line) const {
    std::FILE* file = stream == 0 ? stdout : stderr;
    const std::string text = ranks_.size() == 1 ? line : fmt::format("[{}] {}", index, line);
    std::fwrite(text.data(), 1, text.size(), file);
    std::fflush(file);
  }

  void reap() {
    for (size_t index = 0; index < ranks_.size(); ++index) {
      RankProcess& rank = ranks_[index];
      int status = 0;
      if (!rank.running || waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
      rank.running = false;
      if (status == 0 || failed_) continue;
      failed_ = LaunchClock::now();
      const bool killed = WIFSIGNALED(status);
      status_ = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      complain(killed
                   ? fmt::format("tandem: launch: rank {} (process {}) was ended by signal {}, "
                                 "{}",
                                 index, rank.pid, WTERMSIG(status), strsignal(WTERMSIG(status)))
                   : fmt::format("tandem: launch: rank {} (process {}) ended with exit status {}",
                                 index, rank.pid, status_));
    }
  }

  const std::vector<std::string> command_;
  std::vector<RankProcess> ranks_;
  Launch launch_;
  std::string run_id_;
  sigset_t watched_{}, before_{};
  Connection signals_;
  std::optional<LaunchClock::time_point> failed_;  ///< when the first rank failed
  bool asked_ = false;
  int status_ = 0;
};

}  // namespace

int launch_here(int ranks, const std::vector<std::string>& command) {
  constexpr int kFilesOfRank = 3, kOtherFiles = 300;
  const int files = raise_file_limit(), needed = kFilesOfRank * ranks + kOtherFiles;
  if (files < needed) {
    throw Unsupported(fmt::format("{} ranks: a process may open {} files: expected {} (ulimit -n)",
                                  ranks, files, needed));
  }
  return LocalLaunch(ranks, command).run();
}

}  // namespace tandem::cli
