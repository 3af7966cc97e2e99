#include "engine/launch/processes/launched_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>

#include "core/system/printable.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kMaxLine = size_t{64} << 10;  ///< longer ones are printed in parts

/// This process's environment with those changes.
std::vector<std::string> changed_environment(const Variables& variables) {
  std::vector<std::string> lines;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view line(*entry);
    const std::string_view name = line.substr(0, line.find('='));
    const auto same = [&](const auto& variable) { return variable.first == name; };
    if (std::ranges::none_of(variables, same)) lines.emplace_back(line);
  }
  for (const auto& [name, value] : variables) {
    if (!value.empty()) lines.push_back(name + "=" + value);
  }
  return lines;
}

std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

void print_line(int stream, const std::string& line) {
  std::FILE* file = stream == 0 ? stdout : stderr;
  std::fwrite(line.data(), 1, line.size(), file);
  std::fflush(file);
}

void LaunchedProcess::start(const std::vector<std::string>& command, const Variables& variables,
                            const std::vector<int>& shared, const sigset_t& mask, int input) {
  control::Connection from[3], to[3];  // output, errors, and why the command cannot be run
  for (int i = 0; i < 3; ++i) {
    int pipe[2];
    if (pipe2(pipe, O_CLOEXEC) != 0) throw IoError(fmt::format("pipe: {}", describe_errno(errno)));
    from[i] = control::Connection(pipe[0]);
    to[i] = control::Connection(pipe[1]);
  }
  const auto environment = changed_environment(variables);
  const auto words = pointers_to(command), entries = pointers_to(environment);
  const pid_t parent = getpid();
  pid_ = 0;
  const pid_t pid = fork();
  if (pid == 0) {  // only calls that are safe although another thread held a lock
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    setpgid(0, 0);  // signals reach what the command starts, too
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    if (input >= 0) dup2(input, STDIN_FILENO);
    dup2(to[0].fd(), STDOUT_FILENO);
    dup2(to[1].fd(), STDERR_FILENO);
    for (const int fd : shared) fcntl(fd, F_SETFD, 0);
    execvpe(words.front(), words.data(), entries.data());
    const int error = errno;
    [[maybe_unused]] const auto written = write(to[2].fd(), &error, sizeof error);
    _exit(127);
  }
  if (pid < 0) throw Unsupported(fmt::format("fork: {}", describe_errno(errno)));
  for (auto& end : to) end.close();
  setpgid(pid, pid);
  int error = 0;
  if (read(from[2].fd(), &error, sizeof error) != ssize_t(sizeof error)) {
    pid_ = pid;
    running_ = true;
    for (int i = 0; i < 2; ++i) {
      fcntl(from[i].fd(), F_SETFL, O_NONBLOCK);
      output_[i] = std::move(from[i]);
      line_[i].clear();
    }
    return;
  }
  waitpid(pid, nullptr, 0);
  throw InvalidArgument(fmt::format("launch: {}: {}: expected a command",
                                    printable(command.front()), describe_errno(error)));
}

void LaunchedProcess::send_signal(int signal) const {
  if (running_) kill(-pid_, signal);
}

bool LaunchedProcess::has_ended(int& status) {
  siginfo_t end{};
  if (!running_ || waitid(P_PID, id_t(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      end.si_pid != pid_) {
    return false;
  }
  // Nothing is left to end what a killed process has started. Its group's number is taken until
  // waitpid.
  if (end.si_code != CLD_EXITED) kill(-pid_, SIGKILL);
  waitpid(pid_, &status, 0);
  running_ = false;
  return true;
}

void LaunchedProcess::wait_for_end() {
  if (running_) waitpid(pid_, nullptr, 0);
  running_ = false;
}

void LaunchedProcess::pass_on(int stream, const PrintLine& print) {
  char bytes[16384];
  const ssize_t got = read(output_[stream].fd(), bytes, sizeof bytes);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  std::string& line = line_[stream];
  if (got <= 0) {
    output_[stream].close();
    if (!line.empty()) print(stream, line + "\n");
    line.clear();
    return;
  }
  line.append(bytes, size_t(got));
  for (size_t end; (end = line.find_first_of("\n\r")) != line.npos; line.erase(0, end + 1)) {
    print(stream, line.substr(0, end + 1));
  }
  if (line.size() < kMaxLine) return;
  print(stream, line + "\n");
  line.clear();
}

}  // namespace tandem
