// Traffic: messages on the links of a network, their rates, and the one that ends next. Pure.
//
// Messages on one path travel one after the other; those that share a link share its bandwidth max-min fairly. All
// paths over the same links have the same rate and form a route. A route keeps the bytes that each of its paths has
// carried so far, so an event costs only the routes whose rates it changes.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

namespace ddl {

// A link that a message uses, and how many such messages use it at once, including those of ranks that are not
// simulated.
struct Use {
    int link = 0;
    int copies = 1;
    bool operator<(const Use& other) const { return std::pair(link, copies) < std::pair(other.link, other.copies); }
};

class Traffic {
  public:
    // `capacities`: bytes per second of each link.
    explicit Traffic(std::vector<double> capacities);

    // A path over these links; paths are numbered from 0.
    int add_path(std::vector<Use> uses);
    // Puts a message of `bytes` bytes on a path, behind those that are there.
    void send(int path, double bytes, int message);
    bool is_idle() const { return moving_ == 0; }
    // When the next message ends; infinity if there is none.
    double next();
    // Goes to `now`, at most next(). Adds the messages that end there to `ended`, in the order in which their paths
    // became busy.
    void advance(double now, std::vector<int>& ended);

  private:
    struct Path {
        int route = 0;
        uint64_t since = 0;                        // a count of paths that became busy
        std::deque<std::pair<double, int>> queue;  // bytes, message
    };
    struct Route {
        std::vector<Use> uses;
        std::vector<std::pair<double, int>>
            ends;                 // a heap: at which `carried` a busy path's message ends, and the path
        double carried = 0;       // bytes, of each busy path, up to `at`
        double at = 0, rate = 0;  // seconds; bytes per second
        uint32_t version = 0;     // of its event
        uint32_t mark = 0;
        bool changed = false, fixed = false;
    };
    struct Link {
        double capacity = 0, left = 0;
        double load = 0;
        uint32_t mark = 0;
        std::vector<int> routes;
    };
    struct Event {
        double time;
        int route;
        uint32_t version;
        bool operator>(const Event& other) const { return time > other.time; }
    };

    void carry(Route& route) const;
    void expect(int route);
    const Event* first();
    void change(int route);
    void share();

    std::vector<Link> links_;
    std::vector<Route> routes_;
    std::vector<Path> paths_;
    std::map<std::vector<Use>, int> route_of_;
    std::vector<Event> events_;  // a heap
    std::vector<int> changed_;   // routes whose number of busy paths has changed since share()
    std::vector<int> near_, touched_, bound_;
    std::vector<std::pair<uint64_t, int>> found_;
    double now_ = 0;
    uint64_t busy_ = 0;
    uint32_t mark_ = 0;
    int moving_ = 0;  // busy paths
};

}  // namespace ddl
